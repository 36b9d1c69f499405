"""What a site's clients remember of a run, on its disk: versions by round, so that retries train nothing twice.

A small index names files of tensors. Files are written whole and never changed; the index is replaced last, in one
step, so a site killed at any instant comes back to before or after a message, and gives the same answer to it again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from coterie.errors import RecordError
from coterie.fleet.wire import WireError
from coterie.runs import files

KEPT = 3  # rounds a server can go back: it resumes from one of its last two checkpoints, one each round
_BLANK: dict[str, Any] = {
    "round": -1,
    "opening": -1,
    "phase": 0,
    "before": "",  # the version before the round
    "base": "",  # the one before its last message
    "now": "",  # the one after it
    "past": [],  # [round, the version before it] of earlier rounds
    "lost": -1,  # the last round whose version is gone
    "next": 0,
    "asked": {},  # round → how many models were asked about, and which of them on which batch
}


class Versions:
    """Of one run. Without a folder everything is kept in memory."""

    def __init__(self, folder: Path | None, kept: int = KEPT) -> None:
        self.folder, self.kept = folder, kept
        self._index = dict(_BLANK)
        self._memory: dict[str, dict[str, Tensor]] = {"": {}}
        if folder is not None:
            with files.explained("the site's state", folder):
                folder.mkdir(parents=True, exist_ok=True)
            if (folder / "index.json").exists():
                self._index |= files.read_json(folder / "index.json")

    def at(self, t: int, opening: int, phase: int, heard: tuple[int, int]) -> str:
        """The version that a message is answered from. Raises where it is older than what was answered."""
        index = self._index
        if opening < index["opening"]:
            raise WireError("this message is older than one that was answered")
        if opening == index["opening"]:
            if t != index["round"] or phase < index["phase"]:
                raise WireError("this message is older than one that was answered")
            return str(index["base"]) if phase == index["phase"] else self.settled(heard)
        if t > index["round"]:
            return self.settled(heard)
        if t == index["round"]:
            return str(index["before"])
        if t <= index["lost"]:
            raise WireError(f"the version before round {t} is gone: the last {self.kept} rounds are kept")
        return str(next(version for r, version in [*index["past"], [index["round"], index["before"]]] if r >= t))

    def settled(self, heard: tuple[int, int]) -> str:
        """The version after the last answer that was `heard`, by its opening and phase: one that got lost never was."""
        index = self._index
        if heard[0] == index["opening"] and heard[1] < index["phase"]:
            return str(index["base"])
        return str(index["before"] if heard[0] < index["opening"] else index["now"])

    def read(self, version: str) -> dict[str, Tensor]:
        """What the clients remembered then."""
        if version in self._memory:
            return dict(self._memory[version])
        assert self.folder is not None
        path = self.folder / version
        try:
            with files.explained("the site's state", path):
                return decode(path.read_bytes())
        except SafetensorError as error:
            raise RecordError(f"{path} is damaged: {error}") from None

    def keep(self, t: int, opening: int, phase: int, base: str, after: Mapping[str, Tensor] | None) -> None:
        """A message was answered from `base`; `after` is what is remembered now, None where that is the same."""
        index = dict(self._index)
        if opening != index["opening"]:
            earlier = [[r, v] for r, v in [*index["past"], [index["round"], index["before"]]] if 0 <= r < t]
            if len(earlier) > self.kept - 1:
                index["lost"] = earlier[-self.kept][0]
                earlier = earlier[1 - self.kept :]
            index |= {"past": earlier, "before": base}
        now = base
        if after is not None:
            now = f"version-{index['next']}.safetensors"
            index["next"] += 1
            self._write(now, after)
        self._index = index | {"round": t, "opening": opening, "phase": phase, "base": base, "now": now}

    def count(self, t: int, models: int, batches: Mapping[str, set[str]], most: int, per_batch: int) -> None:
        """Note what is about to be answered in a round, unless it is too much.

        Models are counted as often as they are asked about; on one batch only those that differ: the same question has
        the same answer. What was asked is kept as long as a server can go back to that round.
        """
        asked = self._index["asked"]
        done, before = asked.get(str(t), [0, {}])
        if done + models > most:
            raise WireError(f"round {t} asks about more than the {most} models that this site answers for in one")
        after = {batch: sorted({*before.get(batch, ()), *marks}) for batch, marks in batches.items()}
        often = max(map(len, after.values()), default=0)
        if often > per_batch:
            raise WireError(f"{often} models on one batch are too many: this site answers for {per_batch}")
        kept = {r: what for r, what in asked.items() if int(r) > self._index["lost"]}
        self._index["asked"] = {**kept, str(t): [done + models, {**before, **after}]}

    @property
    def newest(self) -> str:
        """The version after the last answer."""
        return str(self._index["now"])

    @property
    def round(self) -> int:
        """The last round that was opened."""
        return int(self._index["round"])

    def _write(self, version: str, tensors: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            self._memory[version] = dict(tensors)
            return
        whole = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
        files.write(self.folder / version, encode(whole))

    def save(self) -> None:
        """Make it last: the index in one step, and only then are files that it no longer names removed."""
        index = self._index
        needed = {index["before"], index["base"], index["now"], *(version for _, version in index["past"])}
        if self.folder is None:
            self._memory = {v: t for v, t in self._memory.items() if v in needed or not v}
            return
        files.write_json(self.folder / "index.json", index)
        for path in self.folder.glob("version-*.safetensors"):
            if path.name not in needed:
                path.unlink()
