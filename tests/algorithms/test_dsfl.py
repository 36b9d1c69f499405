"""DS-FL against a plain loop over modules of two architectures, and what its aggregates are."""

import pytest
import torch

from builders import classes, linear, mlp
from coterie.algorithms import make
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet
from plain import descend, flat, learn, loss, modules

PLAN = {"steps": 3, "batch": None, "lr": 0.2}  # whole splits: nothing is drawn
DISTIL = {"steps": 2, "batch": None, "lr": 0.4}


@pytest.mark.parametrize(("away", "temperature"), [(None, 0.1), (2, 0.1), (None, "none")])
def test_it_follows_a_plain_loop(away: int | None, temperature: float | str) -> None:
    people, rounds = classes([mlp, linear]), 5
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    rules = [] if away is None else [Stay(((fleet.keys[away], 0, 2),))]
    everyone = modules(fleet)
    rows, state, infos = learn(
        Participation(fleet, *rules), "dsfl", rounds, plan=PLAN, distil=DISTIL, temperature=temperature
    )
    x, target = people.public["public"].double(), None
    for t in range(rounds):
        there = [i for i in range(4) if i != away or t < 2]
        said = []
        for i in there:
            if target is not None:
                wanted = target
                descend(everyone[i], lambda m, w=wanted: -(w * m(x).log_softmax(-1)).sum(-1).mean(), 2, 0.4)
            descend(everyone[i], loss(people, i), 3, 0.2)
            said.append(everyone[i](x).softmax(-1).detach())
        mean = torch.stack(said).mean(0)
        target = mean if temperature == "none" else (mean / float(temperature)).exp()
        target = target / target.sum(-1, keepdim=True)
        assert infos[t].graph[0].tolist() == [1 / len(there) if i in there else 0 for i in range(4)]
    for row, model in zip(rows, everyone, strict=True):
        torch.testing.assert_close(row, flat(model), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.target, target, rtol=0, atol=1e-9)


def test_reduction_makes_the_aggregate_surer_and_keeps_the_order_of_classes() -> None:
    def belief(temperature: float | str) -> torch.Tensor:
        fleet = StackedFleet(classes(), seed=5, dtype=torch.float64)
        _, state, _ = learn(fleet, "dsfl", 1, plan=PLAN, temperature=temperature)
        target: torch.Tensor = state.target
        return target

    plain, sure, vague = belief("none"), belief(0.1), belief(10.0)
    for target in (sure, vague):
        assert torch.equal(target.argsort(-1), plain.argsort(-1))
    assert (sure.max(-1).values > plain.max(-1).values).all()
    torch.testing.assert_close(vague, torch.full_like(vague, 1 / 3), rtol=0, atol=0.05)


def test_what_travels_is_predictions_whatever_the_models() -> None:
    fleet = StackedFleet(classes([mlp, linear]), seed=5)
    learn(fleet, "dsfl", 4, plan=PLAN)
    totals = fleet.ledger.totals()
    assert totals["sent"]["up"]["numbers"] == 4 * 4 * 13 * 3
    assert totals["sent"]["down"]["numbers"] == 3 * 4 * 13 * 3  # nobody has said anything before the first round
    assert totals["broadcast"]["down"]["numbers"] == 3 * 13 * 3


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be a number above 0"):
        make("dsfl", {"temperature": 0.0})
