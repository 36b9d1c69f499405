"""The words agree with the numbers."""

from pathlib import Path

import numpy as np
from folders import write_run

from coterie.report.narrate import next_step, reading
from coterie.report.tables import collect

KEYS = ["ann", "bob", "eve", "zoe"]


def test_each_client_of_a_few_gets_a_sentence() -> None:
    w = np.array([[0.5, 0.4, 0.05, 0.05], [0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25], [0, 0, 0.7, 0.3]])
    assert reading(w, KEYS) == (
        "ann listens mostly to bob (0.4). bob listens to nobody else. "
        "eve listens to everyone about equally (0.25 each). zoe listens to eve (0.7) only."
    )


def test_attention_that_is_spread_names_several() -> None:
    w = np.array([[0.0, 0.4, 0.35, 0.25]] * 4)
    assert reading(w, KEYS).startswith("ann listens mostly to bob (0.4) and eve (0.35). ")


def test_all_alike_is_one_sentence() -> None:
    w = np.full((4, 4), 0.25) + np.diag([0.3, 0, 0, 0])
    assert reading(w, KEYS) == "Everyone listens to everyone about equally (0.25 each)."
    assert reading([[0.5, 0.5], [0, 1]], ["ann", "bob"]) == "ann listens to bob (0.5) only. bob listens to nobody else."


def test_many_clients_are_summed_up() -> None:
    n = 40
    w = np.kron(np.eye(n // 4), np.full((4, 4), 0.25))
    w[0] = np.eye(n)[0]
    w[5, 6] = 0.9
    text = reading(w, [f"c{i}" for i in range(n)])
    assert text.startswith(
        "Of 40 clients, 1 listens to nobody else; the others give half of their attention to 2 other"
    )
    assert "most closely listen c5 to c6 (0.9)" in text


def test_the_next_step_names_the_best_that_was_not_told_the_truth(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5])
    write_run(out, "fedavg", 0, [0.4, 0.4])
    write_run(out, "oracle", 0, [0.9, 0.9])
    line = next_step(collect([out]))
    assert "nothing beats training alone" in line
    assert "fedavg comes closest, accuracy 40.0 %" in line
    assert "`coterie sweep toy --grid plan.lr=" in line
    run = write_run(out, "cobo", 0, [0.6, 0.4])
    line = next_step(collect([out]))
    assert "\n" not in line
    assert "nothing beats" in line  # a tie
    write_run(out, "ditto", 0, [0.6, 0.6])
    line = next_step(collect([out]))
    assert "ditto does best (accuracy 60.0 %, 100 % of clients better off than alone)" in line
    assert f"coterie export {run.parent.parent / 'ditto' / 'seed-0'} --client client-0" in line


def test_alone_there_is_nobody_to_listen_to(out: Path) -> None:
    write_run(out, "local", 0, [0.5, 0.5])
    assert "coterie run toy --algorithms local,fedavg" in next_step(collect([out]))
    assert "coterie run quickstart" in next_step([])
