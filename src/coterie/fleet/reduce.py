"""From gradients, a chunk of rows at a time, to what the ask wants given: rows, sums, inner products, sketches."""

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import NONFINITE, OK, Answer, Gradient


class Sink:
    """Takes rows of gradients chunk by chunk, and keeps no more of them than the ask wants given."""

    def __init__(self, ask: Gradient, width: int, dtype: torch.dtype, device: torch.device, sketch_key: int) -> None:
        self.ask, self.device = ask, device
        self.rows: Tensor | None = None
        if ask.sketch is not None:
            bits = draws.fold(torch.tensor(sketch_key, device=device), torch.arange(width, device=device))
            self.sign = 1 - 2 * ((bits >> 63) & 1).to(dtype)
            self.bucket = (bits & ((1 << 62) - 1)) % ask.sketch
            width = ask.sketch
        self.width, self.dtype = width, dtype
        if ask.give == "sum":
            self.sums = torch.zeros(ask.outputs or 0, width, dtype=dtype, device=device)
            self.weight = torch.zeros(ask.outputs or 0, dtype=dtype, device=device)
        if ask.give == "gram":
            groups, size = ask.gram_shape
            self.gram = torch.zeros(groups, size, size, dtype=dtype, device=device)
            self.open: tuple[Tensor, Tensor] | None = None  # pairs and rows of the last, perhaps unfinished, group

    def take(self, pairs: Tensor, grads: Tensor, good: Tensor) -> None:
        """Take the gradients of some pairs."""
        ask = self.ask
        grads = zeroed(grads, good)
        if ask.sketch is not None:
            small = torch.zeros(len(grads), self.width, dtype=self.dtype, device=self.device)
            grads = small.index_add_(1, self.bucket, grads.to(self.dtype) * self.sign)
        if ask.give == "rows":
            if len(pairs) == ask.m:
                self.rows = grads.to(self.dtype)
            else:
                if self.rows is None:
                    self.rows = torch.zeros(ask.m, self.width, dtype=self.dtype, device=self.device)
                self.rows[pairs.to(self.device)] = grads.to(self.dtype)
        elif ask.give == "sum":
            assert ask.into is not None
            into = ask.into[pairs].to(self.device)
            weight = torch.ones(len(pairs), dtype=self.dtype, device=self.device)
            if ask.weights is not None:
                weight = ask.weights.to(self.device, self.dtype)[pairs.to(self.device)]
            weight = torch.where(good, weight, 0)
            mix = torch.zeros(len(self.sums), len(pairs), dtype=self.dtype, device=self.device)
            mix[into, torch.arange(len(pairs), device=self.device)] = weight
            self.sums.addmm_(mix, grads.to(self.dtype))
            self.weight.index_add_(0, into, weight)
        else:
            self._gram(pairs, grads.to(self.dtype))

    def _gram(self, pairs: Tensor, grads: Tensor) -> None:
        """Pairs come in the order of their groups: finished groups are multiplied and forgotten."""
        ask = self.ask
        assert ask.group is not None
        if self.open is not None:
            pairs = torch.cat([self.open[0], pairs])
            grads = torch.cat([self.open[1], grads])
        last = ask.group[pairs[-1]]
        waiting = ask.group[pairs] == last
        done = int((~waiting).sum())
        self._multiply(pairs[:done], grads[:done])
        self.open = (pairs[done:], grads[done:].clone() if done else grads[done:])

    def _multiply(self, pairs: Tensor, grads: Tensor) -> None:
        if not len(pairs):
            return
        ask = self.ask
        assert ask.group is not None
        assert ask.slot is not None
        group, slot = ask.group[pairs], ask.slot[pairs]
        names, inverse = torch.unique(group, return_inverse=True)
        size = ask.gram_shape[1]
        if len(pairs) == len(names) * size:  # full groups: one batched product
            order = torch.empty(len(names), size, dtype=torch.long)
            order[inverse, slot] = torch.arange(len(pairs))
            flat = order.flatten()
            block = grads if bool((flat == torch.arange(len(flat))).all()) else grads[flat.to(self.device)]
            block = block.view(len(names), size, -1)
            self.gram[names.to(self.device)] = inner_products(block)
            return
        for number, name in enumerate(names.tolist()):
            mine = (inverse == number).nonzero().flatten()
            rows = grads[mine.to(self.device)]
            place = slot[mine].to(self.device)
            self.gram[name, place[:, None], place] = inner_products(rows[None])[0]

    def answer(self, reason: Tensor, loss: Tensor) -> Answer:
        """What the ask wanted given."""
        if self.ask.give == "sum":
            return Answer(reason, sums=self.sums, weight=self.weight, loss=loss)
        if self.ask.give == "gram":
            if self.open is not None:
                self._multiply(*self.open)
            return self._finite_gram(reason, loss)
        rows = self.rows
        if rows is None:
            rows = torch.zeros(0, self.width, dtype=self.dtype, device=self.device)
        return Answer(reason, rows=rows, loss=loss)

    def _finite_gram(self, reason: Tensor, loss: Tensor) -> Answer:
        """Inner products, where a gradient whose square overflows is not finite: beside finite squares all others are.

        (|⟨g, h⟩| is at most the larger of ‖g‖² and ‖h‖².)
        """
        ask = self.ask
        assert ask.group is not None
        assert ask.slot is not None
        over = ~torch.isfinite(self.gram.diagonal(dim1=1, dim2=2))
        gram = self.gram.masked_fill(over[:, :, None] | over[:, None, :], 0)
        mine = over[ask.group.to(self.device), ask.slot.to(self.device)]
        reason = torch.where(mine & (reason == OK), NONFINITE, reason).to(reason.dtype)
        return Answer(reason, gram=gram, loss=loss.masked_fill(mine, 0))


def inner_products(block: Tensor, span: int = 8192) -> Tensor:
    """G×q×q inner products of G×q rows: long rows in spans, since a product of a few very long rows is slow alone."""
    g, q, d = block.shape
    whole = d // span * span
    if whole <= span:
        return block @ block.mT
    parts = block[..., :whole].unflatten(-1, (-1, span)).transpose(1, 2).reshape(-1, q, span)
    gram: Tensor = (parts @ parts.mT).view(g, -1, q, q).sum(1)
    rest = block[..., whole:]
    return gram + rest @ rest.mT


def finite(rows: Tensor) -> Tensor:
    """Which rows hold finite numbers only: the largest magnitude keeps NaN and infinity.

    So does a sum, which overflows now and then as well. On the host it is looked at first, at a twentieth of the cost.
    """
    if not rows.shape[1]:
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if rows.device.type == "cpu":
        sums = torch.isfinite(rows.sum(1))
        if bool(sums.all()):
            return sums
    return torch.isfinite(torch.linalg.vector_norm(rows, float("inf"), dim=1))


def zeroed(rows: Tensor, good: Tensor) -> Tensor:
    """Rows with those that are not good set to zero. On the host a look spares the pass."""
    if good.device.type == "cpu" and bool(good.all()):
        return rows
    return rows.masked_fill(~good.view(-1, *[1] * (rows.ndim - 1)), 0)
