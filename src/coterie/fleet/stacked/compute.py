"""One model's loss, gradient and outputs, made those of many rows at once, and compiled where that is asked for."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_map

from coterie.errors import ModelError
from coterie.fleet.layout import KeyedDropout
from coterie.fleet.stacked.stack import Rows, Stack
from coterie.tasks import Task, logits_of


class Compute:
    """`compiled` is whether steps are, or the name of one of torch.compile's backends."""

    def __init__(self, task: Task, device: torch.device, autocast: torch.dtype | None, compiled: bool | str) -> None:
        self.task, self.device, self.autocast, self.compiled = task, device, autocast, compiled
        self._seen: set[int] = set()  # stacks whose module was seen to run under vmap

    def value(self, stack: Stack) -> Callable[..., tuple[Tensor, tuple[Tensor, Rows]]]:
        """(parameters, buffers, dropout key, x, y, weights) of one row → loss, (loss per sample, buffers after)."""

        def value(
            parameters: Rows, buffers: Rows, key: Tensor | None, x: Tensor, y: Tensor, w: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, Rows]]:
            out, after = self.outputs(stack, parameters, buffers, key, x)
            each = self.task.loss(out, y)
            return (each.mean() if w is None else (each * w).sum()), (each, after)

        return value

    def outputs(
        self, stack: Stack, parameters: Rows, buffers: Rows, key: Tensor | None, x: Tensor
    ) -> tuple[Tensor, Rows]:
        """What the module of one row gives, and its buffers afterwards, which are copies."""
        state, after = given(stack, parameters, buffers, key)
        return logits_of(functional_call(stack.module, state, (x,))), after

    def forward(self, stack: Stack) -> Callable[..., Tensor]:
        """(parameters, buffers, x) of many rows → their outputs, in eval mode."""

        def forward(parameters: Rows, buffers: Rows, x: Tensor) -> Tensor:
            return logits_of(functional_call(stack.module, {**parameters, **buffers}, (x,)))

        return self.batched(stack, False, forward)

    def batched(self, stack: Stack, train: bool, fn: Callable[..., Any]) -> Callable[..., Any]:
        """vmap over rows, with the module in train or eval mode."""

        def call(*args: Any) -> Any:
            stack.module.train(train)
            try:
                with self._precision():
                    return vmap(fn, in_dims=tuple(_axes(a) for a in args))(*args)
            except RuntimeError as error:
                name, line = type(stack.module).__name__, str(error).splitlines()[0]
                if "randomness" in line:
                    raise ModelError(
                        f"{name} draws random numbers outside nn.Dropout, which cannot be keyed in a stack: "
                        "use nn.Dropout modules, or LoopFleet"
                    ) from error
                if "vmap" in str(error) or "data-dependent" in str(error):
                    raise ModelError(f"{name} cannot run under vmap ({line}): use LoopFleet") from error
                raise

        return call

    def differentiated(
        self, stack: Stack, value: Callable[..., Any], argnums: int | tuple[int, ...] = 0
    ) -> Callable[..., Any]:
        """Gradients and values of all rows under vmap; of a single row by plain autograd, whose layers cost half.

        That a module can run under vmap is seen once, so that a lone client is refused what many would be refused.
        """
        many = self.batched(stack, True, grad_and_value(value, argnums=argnums, has_aux=True))
        places = (argnums,) if isinstance(argnums, int) else argnums

        def one(*args: Any) -> Any:
            if self.compiled or next(len(p) for i in places for p in args[i].values()) > 1:
                return many(*args)
            if stack.number not in self._seen:
                with torch.no_grad():
                    self.batched(stack, True, value)(*args)
                self._seen.add(stack.number)
            alone = [tree_map(lambda t: t if t is None else t[0], a) for a in args]
            for i in places:
                alone[i] = {name: p.detach().requires_grad_() for name, p in alone[i].items()}
            stack.module.train()
            with torch.enable_grad(), self._precision():
                loss, aux = value(*alone)
            leaves = [p for i in places for p in alone[i].values()]
            if loss.requires_grad:
                found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            else:  # nothing of the model is in it
                found = tuple(torch.zeros_like(leaf) for leaf in leaves)
            flat = iter(found)
            grads = tuple({name: next(flat)[None] for name in alone[i]} for i in places)
            after = tree_map(lambda t: t.detach()[None], (loss, aux))
            return (grads[0] if isinstance(argnums, int) else grads), after

        return one

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def compiled_step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function, compiled where asked for."""
        if not self.compiled:
            return fn
        backend = self.compiled if isinstance(self.compiled, str) else "inductor"
        arguments = {f"L[{name!r}]" for name in inspect.signature(fn).parameters}

        def varies(guards: Sequence[Any]) -> list[bool]:
            """Only what is given to a step differs from call to call: modules, tasks and code need no second look."""
            return [not g.name.startswith(("L[", "G[")) or g.name.partition("]")[0] + "]" in arguments for g in guards]

        options: dict[str, Any] = {"guard_filter_fn": varies}
        return torch.compile(fn, fullgraph=True, dynamic=False, backend=backend, options=options)

    @contextmanager
    def never_eager(self) -> Iterator[None]:
        """More sizes than torch keeps are an error, and nothing falls back in silence."""
        if not self.compiled:
            yield
            return
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            yield

    # ---- statistics of normalisation ---------------------------------------------------------------------------------

    def statistics(self, stack: Stack, parameters: Rows, batches: Iterable[Tensor]) -> Rows:
        """A new module's buffers after one pass over batches of inputs (m×B×…), every batch weighing the same."""
        norms = [m for m in stack.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        quiet = [m for m in stack.module.modules() if isinstance(m, KeyedDropout)]
        before, drops = [m.momentum for m in norms], [m.p for m in quiet]
        rows = len(next(iter(parameters.values())))
        buffers = {name: value.expand(rows, *value.shape) for name, value in stack.fresh.items()}

        def run(p: Rows, b: Rows, x: Tensor) -> Rows:
            return self.outputs(stack, p, b, None, x)[1]

        one = self.batched(stack, True, run)
        try:
            for layer in quiet:
                layer.p = 0.0
            for number, x in enumerate(batches):
                for norm in norms:  # momentum 1/(number + 1) is the plain mean over batches
                    norm.momentum = 1.0 / (number + 1)
                with torch.no_grad():
                    buffers = one(parameters, buffers, x)
            return buffers
        finally:
            for norm, momentum in zip(norms, before, strict=True):
                norm.momentum = momentum
            for layer, p in zip(quiet, drops, strict=True):
                layer.p = p


def given(stack: Stack, parameters: Rows, buffers: Rows, key: Tensor | None) -> tuple[Rows, Rows]:
    """What a module is called with: parameters, copies of its buffers and its dropout's keys; and these copies."""
    after = {name: b.clone() for name, b in buffers.items()}
    state = {**parameters, **after}
    if key is not None:
        state.update(dict.fromkeys(stack.keys, key))
    return state, after


def _axes(arg: Any) -> Any:
    """vmap's axis of an argument: rows first, and None for what is not there."""
    return None if arg is None or (isinstance(arg, dict) and not arg) else 0
