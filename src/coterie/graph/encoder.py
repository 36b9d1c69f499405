"""How alike two clients' models have moved, by a small learned encoder E (SCooL §4.3; also meta-L2C's).

    f(θ_i, θ_j) = mean over parameter tensors of ⟨E(u_i), E(u_j)⟩,   u_i = θ_i − θ_i⁰ scaled to unit norm

The paper applies two layers of 10 and 5 outputs to each parameter tensor. Tensors differ in width and E may not, so
each is first projected to WIDTH numbers by a fixed random map that keeps inner products (every column goes, with a
random sign, to one of them); E is the same for all tensors. Both layers end in tanh, so that |f| ≤ 5.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie import draws

WIDTH, HIDDEN, OUT = 16, 10, 5
SIZES = (WIDTH * HIDDEN, HIDDEN, HIDDEN * OUT, OUT)
BLOCK = 1 << 16  # columns projected at once


def sketch(rows: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Rows at unit norm, every tensor of theirs projected: n × tensors × WIDTH in float64, where the rows are."""
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return torch.stack([_projected(rows, a, b) for a, b in spans], 1)


def _projected(rows: Tensor, a: int, b: int) -> Tensor:
    made = rows.new_zeros(len(rows), WIDTH, dtype=torch.float64)
    for start in range(a, b, BLOCK):
        columns = torch.arange(start, min(start + BLOCK, b), device=rows.device)
        key = draws.fold(torch.tensor(draws.name("projection"), device=rows.device), columns)
        target = (draws.unit(key) * WIDTH).long()
        sign = 1 - 2 * (key & 1)
        table = torch.nn.functional.one_hot(target, WIDTH) * sign[:, None]
        made = made + (rows[:, start : start + len(columns)] @ table.to(rows.dtype)).double()
    return made


def initial(generator: torch.Generator) -> dict[str, Tensor]:
    """φ, and Adam's memory of it."""
    fans = [WIDTH, WIDTH, HIDDEN, HIDDEN]
    parts = [
        torch.randn(size, generator=generator, dtype=torch.float64) / fan**0.5
        for size, fan in zip(SIZES, fans, strict=True)
    ]
    phi = torch.cat(parts)
    return {"phi": phi, "exp_avg": torch.zeros_like(phi), "exp_avg_sq": torch.zeros_like(phi), "step": torch.zeros(())}


def scores(phi: Tensor, sketched: Tensor) -> Tensor:
    """f for every pair: n×n."""
    first, bias, second, last = phi.split(SIZES)
    hidden = torch.tanh(sketched @ first.view(WIDTH, HIDDEN) + bias)
    code = torch.tanh(hidden @ second.view(HIDDEN, OUT) + last)
    return torch.einsum("ilk,jlk->ij", code, code) / code.shape[1]


def log_attention(phi: Tensor, sketched: Tensor, allowed: Tensor) -> Tensor:
    """log p_ij: the softmax (25) of f over those i may listen to; −∞ elsewhere."""
    f = scores(phi, sketched).masked_fill(~allowed, -1e300)  # finite, for the slope of a row of nobody
    return torch.where(allowed, f - f.logsumexp(1, keepdim=True), -torch.inf)


def descend(kept: dict[str, Tensor], slope: Tensor, lr: float, weight_decay: float) -> dict[str, Tensor]:
    """φ and its memory after one step of Adam down a slope."""
    phi = kept["phi"].clone().requires_grad_()
    adam = torch.optim.Adam([phi], lr=lr, weight_decay=weight_decay)
    names = ("step", "exp_avg", "exp_avg_sq")
    adam.state[phi] = {name: kept[name].clone() for name in names}
    phi.grad = slope
    adam.step()
    return {"phi": phi.detach()} | {name: adam.state[phi][name] for name in names}
