"""docs/privacy.md says of every algorithm what it sends and what that can reveal."""

import re
from pathlib import Path

from coterie.algorithms import ALGORITHMS

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


def test_every_algorithm_is_in_the_table_once():
    named = [name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])]
    assert len(named) == len(set(named))
    assert not set(ALGORITHMS) - set(named), "say in docs/privacy.md what it sends and what that reveals"


def test_every_row_answers_all_four_questions():
    assert all(len(row) == 5 and all(row) for row in ROWS)
