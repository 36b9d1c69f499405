"""Numbers are held against the same ones worked out by hand."""

import io
import json
import statistics
from pathlib import Path

import pytest
from folders import write_run
from rich.console import Console

from coterie.errors import RecordError
from coterie.report.numbers import human
from coterie.report.tables import better_off, collect, comparisons, for_json, latex, markdown, table


def shown(results: list, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(results))
    return console.export_text()


def test_spread_over_seeds_and_over_clients_are_kept_apart(out: Path) -> None:
    per_seed = {0: [0.5, 0.7], 1: [0.6, 1.0], 2: [0.4, 0.4]}
    for seed, accuracy in per_seed.items():
        write_run(out, "fedavg", seed, accuracy, sent=600_000, last=[0.3, 0.5])
    (compared,) = comparisons(collect([out]))
    (row,) = compared.rows
    cells = dict(zip(compared.columns, compared.cells(row), strict=True))
    means = [100 * statistics.mean(v) for v in per_seed.values()]  # 60, 80, 40
    assert cells["accuracy (%)"] == f"{statistics.mean(means):.1f} ± {statistics.stdev(means):.1f}" == "60.0 ± 20.0"
    assert cells["last round"] == "40.0 ± 0.0"
    assert cells["spread"] == f"{statistics.mean([10, 20, 0]):.1f}"
    assert cells["worst client"] == "50.0"
    assert cells["better off"] == "–"  # no local run
    assert (cells["sent"], cells["broadcast"]) == ("1.2 M", "600 k")
    assert "seeds 0, 1, 2" in compared.head
    assert "digits, 2 clients" in compared.head


def test_one_seed_has_no_spread(out: Path) -> None:
    write_run(out, "fedavg", 3, [0.5, 0.7])
    text = markdown(collect([out]))
    assert "±" not in text
    assert "60.0" in text
    assert "seed 3" in text


def test_better_off_is_held_against_local_of_the_same_seed(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5, 0.5, 0.5])
    write_run(out, "local", 1, [0.9, 0.1, 0.9, 0.9])
    write_run(out, "cobo", 0, [0.6, 0.5, 0.4, 0.7])  # a tie gains nothing: 2 of 4
    write_run(out, "cobo", 1, [0.6, 0.5, 0.4, 0.7])  # 1 of 4
    results = collect([out])
    assert [better_off(r, results) for r in results] == [0.5, 0.25, None, None]
    (compared,) = comparisons(results)
    assert {row.name: row.better for row in compared.rows} == {"cobo": 0.375, "local": None}


def test_a_json_file_counts_local_runs_of_other_folders(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "local", 0, [0.5, 0.5, 0.5, 0.5], last=[0.9, 0.9, 0.9, 0.9])
    write_run(tmp_path / "b", "cobo", 0, [0.6, 0.6, 0.6, 0.4], last=[0.6, 0.6, 0.6, 1.0])
    by_name = {r["algorithm"]: r for r in for_json(collect([tmp_path / "a", tmp_path / "b"]))}
    assert by_name["cobo"]["metrics"]["share_improved"] == 0.75
    assert by_name["cobo"]["last"]["share_improved"] == 0.25
    assert by_name["local"]["metrics"]["share_improved"] is None
    assert "about" not in by_name["cobo"]


def test_better_is_lower_for_a_loss(out: Path) -> None:
    write_run(out, "local", 0, [2.0, 4.0], main="loss", higher=False)
    write_run(out, "fedavg", 0, [1.0, 5.0], main="loss", higher=False)
    write_run(out, "ditto", 0, [1.0, 1.0], main="loss", higher=False)
    results = collect([out])
    assert [better_off(r, results) for r in results] == [1.0, 0.5, None]
    (compared,) = comparisons(results)
    assert compared.winner is not None
    assert compared.winner.name == "ditto"


def test_a_client_without_a_value_counts_for_nobody(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5, 0.5])
    run = write_run(out, "fedavg", 0, [0.6, 0.4, 0.9])
    result = json.loads((run / "result.json").read_text())
    result["clients"]["accuracy"][2] = None
    (run / "result.json").write_text(json.dumps(result))
    results = collect([out])
    assert better_off(results[0], results) == 0.5


def test_local_runs_on_other_data_are_no_reference(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.6, 0.6])
    write_run(tmp_path / "b", "local", 0, [0.5, 0.5], sizes={"train": [99, 99]})
    results = collect([tmp_path / "a", tmp_path / "b"])
    assert better_off(results[0], results) is None
    write_run(tmp_path / "c", "local", 0, [0.5, 0.5])
    results = collect([tmp_path / "a", tmp_path / "c"])
    assert better_off(results[0], results) == 1.0


def test_the_reference_of_the_own_folder_comes_first(tmp_path: Path) -> None:
    for folder, alone in (("a", 0.9), ("b", 0.1)):
        write_run(tmp_path / folder, "local", 0, [alone, alone])
        write_run(tmp_path / folder, "fedavg", 0, [0.5, 0.5])
    results = collect([tmp_path])
    (compared,) = comparisons(results)
    assert {row.name: row.better for row in compared.rows if row.algorithm == "fedavg"} == {
        "fedavg (a)": 0.0,
        "fedavg (b)": 1.0,
    }


def test_several_experiments_make_several_tables(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.6, 0.6])
    write_run(tmp_path / "b", "fedavg", 0, [0.6, 0.6], experiment="other", resplit=True)
    write_run(tmp_path / "c", "fedavg", 0, [0.6, 0.6], scale="paper", facts={"data": "x", "division": "by page"})
    results = collect([tmp_path])
    text = markdown(results)
    assert text.count("| algorithm |") == 3
    assert text.count("Split: not the publisher's (resplit).") == 1
    assert text.count("Split: the publisher's.") == 1
    assert text.count("Split: by page.") == 1
    assert latex(results).count(r"\begin{tabular}") == 3
    assert "scale paper" in shown(results)


def test_the_winner_was_not_told_the_truth(out: Path) -> None:
    write_run(out, "oracle", 0, [0.9, 0.9])
    write_run(out, "cobo", 0, [0.8, 0.8])
    write_run(out, "local", 0, [0.7, 0.7])
    text = markdown(collect([out]))
    assert "**80.0**" in text
    assert "| 90.0 |" in text


def test_latex_is_escaped_and_regular(out: Path) -> None:
    write_run(out, "finetuned_fedavg", 0, [0.6, 0.6])
    write_run(out, "finetuned_fedavg", 1, [0.7, 0.7])
    text = latex(collect([out]))
    assert r"finetuned\_fedavg & \textbf{65.0 $\pm$ 7.1} &" in text
    assert r"accuracy (\%)" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(body) == 2
    assert {line.replace(r"\&", "").count("&") for line in body} == {7}
    assert "_" not in text.replace(r"\_", "")


def test_eighty_columns_are_enough(out: Path) -> None:
    for seed in (0, 1):
        write_run(out, "finetuned_fedavg", seed, [0.6 + seed / 10, 0.8], sent=123_456_789)
        write_run(out, "local", seed, [0.5, 0.5])
    text = shown(collect([out]))
    assert "…" not in text
    assert "finetuned_fedavg" in text
    assert "247 M" in text
    assert max(map(len, text.splitlines())) <= 80


def test_rows_follow_the_experiment(out: Path) -> None:
    (out / "experiment.json").write_text(
        json.dumps({"experiment": {"algorithms": {"local": {}, "cobo": {}, "avg": {}}}})
    )
    for name in ("avg", "cobo", "local"):
        write_run(out, name, 10, [0.5, 0.5])
        write_run(out, name, 2, [0.5, 0.5])
    found = [(r["algorithm"], r["seed"]) for r in collect([out, out / "cobo", out / "avg" / "seed-2"])]
    assert found == [("local", 2), ("local", 10), ("cobo", 2), ("cobo", 10), ("avg", 2), ("avg", 10)]


def test_uneven_seeds_are_said(out: Path) -> None:
    write_run(out, "fedavg", 0, [0.6, 0.6])
    write_run(out, "fedavg", 1, [0.6, 0.6])
    write_run(out, "local", 0, [0.5, 0.5])
    text = markdown(collect([out]))
    assert "fedavg (2 seeds)" in text
    assert "local (1 seed)" in text


def test_what_cannot_be_read_is_said_in_a_sentence(out: Path) -> None:
    with pytest.raises(RecordError, match="there is no folder"):
        collect([out / "nowhere"])
    with pytest.raises(RecordError, match="holds no run"):
        collect([out])
    run = write_run(out, "fedavg", 0, [0.6, 0.6])
    told = json.loads((run / "run.json").read_text())

    (run / "run.json").write_text(json.dumps(told | {"status": "paused"}))
    with pytest.raises(RecordError, match=r"is paused, not finished: go on with `coterie resume .*seed-0`"):
        collect([out])
    (run / "run.json").write_text(json.dumps(told | {"format": 2}))
    with pytest.raises(RecordError, match="format 2"):
        collect([out])
    (run / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"run\.json is damaged"):
        collect([out])
    (run / "run.json").write_text(json.dumps({k: v for k, v in told.items() if k != "keys"}))
    with pytest.raises(RecordError, match="it has no 'keys'"):
        collect([out])
    (run / "run.json").write_text(json.dumps(told | {"keys": ["a"]}))
    with pytest.raises(RecordError, match="for each of 1 clients"):
        collect([out])
    (run / "run.json").write_text(json.dumps(told))
    (run / "result.json").write_text("[]")
    with pytest.raises(RecordError, match="must hold a table"):
        collect([out])
    (run / "result.json").unlink()
    with pytest.raises(RecordError, match=r"result\.json is missing"):
        collect([out])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (999.6, "1 k"),
        (1000, "1 k"),
        (1234, "1.23 k"),
        (56_789, "56.8 k"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (1_200_000, "1.2 M"),
        (3.4e12, "3.4 T"),
    ],
)
def test_counts_for_people(count: float, text: str) -> None:
    assert human(count) == text


def test_the_gap_between_training_and_test_stands_beside_them(out: Path) -> None:
    run = write_run(out, "fedavg", 0, [0.5, 0.7])
    assert "gap" not in comparisons(collect([out]))[0].columns
    told = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(told | {"train": {"accuracy": 0.85, "loss": 0.1}}))
    write_run(out, "local", 0, [0.5, 0.7])
    (compared,) = comparisons(collect([out]))
    cells = {row.name: dict(zip(compared.columns, compared.cells(row), strict=True)) for row in compared.rows}
    assert (cells["fedavg"]["train"], cells["fedavg"]["gap"]) == ("85.0", "25.0")
    assert (cells["local"]["train"], cells["local"]["gap"]) == ("–", "–")
    assert "training data" in compared.foot


def test_a_variant_that_is_told_the_truth_wins_nothing_either(out: Path) -> None:
    write_run(out, "allforone-oracle", 0, [0.9, 0.9])
    write_run(out, "allforone-bin", 0, [0.8, 0.8])
    (compared,) = comparisons(collect([out]))
    assert compared.winner is not None
    assert compared.winner.name == "allforone-bin"
