from pathlib import Path

import pytest
import torch

from coterie.errors import RecordError
from coterie.runs.checkpoint import Checkpoint, load, rounds, save


def point(done: int) -> Checkpoint:
    tensors = {"a": torch.arange(12.0).reshape(3, 4).T, "b": torch.tensor([True]), "c": torch.zeros(0, 2)}
    return Checkpoint(done, {"seconds": 1.5}, tensors)


def test_a_checkpoint_comes_back(tmp_path: Path):
    save(tmp_path, point(3))
    back = load(tmp_path, 3)
    assert (back.round, back.note) == (3, {"seconds": 1.5})
    assert all(torch.equal(back.tensors[k], v) for k, v in point(3).tensors.items())


def test_the_last_two_are_kept(tmp_path: Path):
    for done in (1, 2, 10):
        save(tmp_path, point(done))
    assert rounds(tmp_path) == [10, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_any_changed_byte_is_seen(tmp_path: Path):
    save(tmp_path, point(1))
    path = tmp_path / "round-000001.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        if whole[place : place + 1] == b" ":  # the header is padded with blanks that mean nothing
            continue
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RecordError, match="damaged"):
            load(tmp_path, 1)
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError, match="damaged"):
            load(tmp_path, 1)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import errno

    save(tmp_path, point(1))
    before = (tmp_path / "round-000001.safetensors").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match="the disk is full"):
        save(tmp_path, point(1))
    assert (tmp_path / "round-000001.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
