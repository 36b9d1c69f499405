"""Where reports are tested."""

from pathlib import Path

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of an experiment, still without runs."""
    folder = tmp_path / "runs" / "toy-small"
    folder.mkdir(parents=True)
    return folder
