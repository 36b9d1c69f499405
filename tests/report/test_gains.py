"""Gains and their intervals against scipy's paired test, and the wider ones of data divided anew."""

import io
import json

import numpy as np
import pytest
from folders import write_run
from rich.console import Console
from scipy import stats

from coterie.errors import RecordError
from coterie.report import figures, gains
from coterie.report.tables import collect, comparisons

ALONE = np.array([[0.50, 0.62], [0.55, 0.60], [0.41, 0.66], [0.48, 0.61]])  # seeds × clients
TOGETHER = ALONE + np.array([[0.10, -0.02], [0.07, 0.01], [0.12, -0.03], [0.05, 0.00]])


def fill(out, **about):
    for seed in range(4):
        write_run(out, "local", seed, ALONE[seed], **about)
        write_run(out, "allforone-bin", seed, TOGETHER[seed], **about)
    (compared,) = comparisons(collect([out]))
    return compared


def test_a_fixed_division_has_the_interval_of_the_paired_test(out) -> None:
    (name, each), *others = gains.gains(fill(out)).items()
    assert (name, others) == ("allforone-bin", [])
    for client in range(2):
        paired = stats.ttest_rel(TOGETHER[:, client], ALONE[:, client])
        low, high = 100 * np.array(paired.confidence_interval(0.95))
        assert each.mean[client] == pytest.approx((low + high) / 2)
        assert each.half[client] == pytest.approx((high - low) / 2)


def test_divided_anew_it_is_wider_by_the_share_of_test_data(out) -> None:
    sizes = {"train": [30, 10], "validation": [10, 10], "test": [20, 30]}
    each = gains.gains(fill(out, resplit=True, sizes=sizes))["allforone-bin"]
    for client, share in enumerate((20 / 40, 30 / 20)):
        gain = 100 * (TOGETHER - ALONE)[:, client]
        half = stats.t.ppf(0.975, 3) * np.sqrt(gain.var(ddof=1) * (1 / 4 + share))
        assert each.half[client] == pytest.approx(half)


def test_lower_is_a_gain_for_a_loss_and_one_seed_has_no_interval(out) -> None:
    write_run(out, "local", 0, [2.0, 3.0], main="loss", higher=False)
    write_run(out, "cobo", 0, [1.5, 3.5], main="loss", higher=False)
    each = gains.gains(comparisons(collect([out]))[0])["cobo"]
    assert each.mean.tolist() == [0.5, -0.5]
    assert np.isnan(each.half).all()


def test_another_metric_has_its_own_direction(out) -> None:
    for name, losses in (("local", [0.9, 0.4]), ("cobo", [0.7, 0.5])):
        run = write_run(out, name, 0, [0.5, 0.5])
        result = json.loads((run / "result.json").read_text())
        result["clients"]["loss"] = losses
        (run / "result.json").write_text(json.dumps(result))
    (compared,) = comparisons(collect([out]))
    np.testing.assert_allclose(gains.gains(compared, "loss")["cobo"].mean, [0.2, -0.1])
    assert gains.gains(compared)["cobo"].mean.tolist() == [0, 0]
    with pytest.raises(RecordError, match="has no 'los' of each client: did you mean loss"):
        gains.markdown(collect([out]), "los")


def test_the_tables_say_it_and_need_a_local_run(out) -> None:
    fill(out)
    text = gains.markdown(collect([out]))
    assert "| gain over local | client-0 | client-1 |" in text
    assert "| alone: accuracy (%) | 48.5 | 62.2 |" in text
    assert "| allforone-bin | +8.5 ± 4.9 | -1 ± 2.9 |" in text
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(gains.table(collect([out])))
    assert "+8.5 ± 4.9" in console.export_text()
    with pytest.raises(RecordError, match="no run of 'local'"):
        gains.markdown(collect([out / "allforone-bin"]))


def test_the_figure_shows_every_gain(out) -> None:
    compared = fill(out)
    figure = figures._gains(compared, figures._looks([row.name for row in compared.rows]))
    assert figure is not None
    (axes,) = figure.axes
    (bars,) = axes.containers
    np.testing.assert_allclose(bars.lines[0].get_xdata(), [8.5, -1.0])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["client-0", "client-1"]
