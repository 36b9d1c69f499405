"""A first guess at communities, from likelihoods alone: who explains, and is explained by, the same others.

The likelihoods' strongest directions are found by power iteration and clients grouped there by k-means from centres far
apart. Whatever is drawn goes by the clients' keys, and products and distances know no order: permuted clients give a
permuted guess, which spectral clustering by libraries does not promise.
"""

import torch
from torch import Tensor

from coterie.graph.priors.base import Evidence

POWERS, MOVES = 4, 8
SURE = 0.8  # of a guess


def guessed(evidence: Evidence, communities: int) -> Tensor:
    """Memberships n×M, each mostly in one."""
    clients, counted = evidence.clients, evidence.others
    linked = torch.sigmoid(evidence.log_p)
    usual = (linked * counted).sum() / counted.sum().clamp(min=1)
    linked = torch.where(counted, linked - usual, 0)
    linked = linked + linked.T
    draws = [clients.uniform(f"direction {g}", clients.everyone) for g in range(communities)]
    directions = torch.stack(draws, 1) - 0.5
    for _ in range(POWERS):
        directions = torch.linalg.qr(linked @ directions).Q
    place = linked @ directions
    gap = torch.cdist(place, place)
    centres = [int(clients.uniform("first", clients.everyone).argmin())]
    while len(centres) < communities:
        centres.append(int(gap[centres].amin(0).argmax()))
    centre = place[centres]
    for _ in range(MOVES):
        member = torch.nn.functional.one_hot(torch.cdist(place, centre).argmin(1), communities).to(place)
        size = member.sum(0)[:, None]
        centre = torch.where(size > 0, member.T @ place / size.clamp(min=1), centre)
    return SURE * member + (1 - SURE) / communities
