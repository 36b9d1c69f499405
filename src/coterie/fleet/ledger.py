"""What the asks move, up and down, per client and kind, in numbers and bytes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Counts = dict[str, NDArray[np.int64]]
_COLUMNS = (("up", "numbers"), ("up", "bytes"), ("down", "numbers"), ("down", "bytes"))


class Ledger:
    """`sent` counts every copy, as transported; `broadcast` counts each distinct payload once, as most papers do.

    Counted are the tensors: model rows, gradients, predictions, losses. The few scalars of a plan, an index or the free
    loss beside a gradient are framing. Nothing moves for an `Own` model, an absent client or the reserved server.
    """

    def __init__(self, clients: int) -> None:
        self.sent: Counts = {}  # kind → clients × (up numbers, up bytes, down numbers, down bytes)
        self.broadcast: Counts = {}  # kind → the same four, in all
        self._clients = clients

    def charge(self, kind: str, clients: NDArray[np.int64], up: NDArray[np.int64], down: NDArray[np.int64],
               broadcast_down: int, itemsize: int, up_itemsize: int | None = None) -> None:  # fmt: skip
        """Add what each of these clients sent and was sent, in numbers; those going up may have been rounded."""
        up_itemsize = itemsize if up_itemsize is None else up_itemsize
        if kind not in self.sent:
            self.sent[kind] = np.zeros((self._clients, 4), dtype=np.int64)
            self.broadcast[kind] = np.zeros(4, dtype=np.int64)
        step = np.stack([up, up * up_itemsize, down, down * itemsize], axis=1)
        np.add.at(self.sent[kind], clients, step)
        total = int(up.sum())
        self.broadcast[kind] += (total, total * up_itemsize, broadcast_down, broadcast_down * itemsize)

    def totals(self) -> dict[str, Any]:
        """{"sent" | "broadcast": {"up" | "down": {"numbers", "bytes"}}} over all kinds and clients."""
        sums = {
            "sent": sum((v.sum(0) for v in self.sent.values()), np.zeros(4, dtype=np.int64)),
            "broadcast": sum(self.broadcast.values(), np.zeros(4, dtype=np.int64)),
        }
        result: dict[str, Any] = {}
        for name, four in sums.items():
            result[name] = {"up": {}, "down": {}}
            for (way, unit), value in zip(_COLUMNS, four, strict=True):
                result[name][way][unit] = int(value)
        return result

    def copy(self) -> "Ledger":
        """A ledger that no longer follows this one."""
        twin = Ledger(self._clients)
        twin.sent = {k: v.copy() for k, v in self.sent.items()}
        twin.broadcast = {k: v.copy() for k, v in self.broadcast.items()}
        return twin

    def state(self) -> dict[str, Tensor]:
        """As tensors, for a checkpoint."""
        return {f"sent/{k}": torch.from_numpy(v.copy()) for k, v in self.sent.items()} | {
            f"broadcast/{k}": torch.from_numpy(v.copy()) for k, v in self.broadcast.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint holds."""
        pick = {
            way: {k.partition("/")[2]: v.numpy().copy() for k, v in state.items() if k.startswith(way)}
            for way in ("sent", "broadcast")
        }
        self.sent, self.broadcast = pick["sent"], pick["broadcast"]
