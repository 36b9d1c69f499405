"""Linear layers trained without their gradients ever being written down.

The gradient of a linear layer's weight is δᵀa: what came back to the layer's output, times what went in. Plain SGD is
then one product that adds into the weight, and the gradient, as large as the weight itself, is neither made, stored nor
read again. δ is the gradient of zeros that are added to the output (the tap); a is seen on the way in.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.tasks import Task, logits_of

LEAST = 4096  # numbers in a weight: smaller ones are not worth a product of their own

torch.library.define("coterie::add_product", "(Tensor(a!) rows, Tensor left, Tensor right) -> ()")


@torch.library.impl("coterie::add_product", "CompositeExplicitAutograd")
def _add_product(rows: Tensor, left: Tensor, right: Tensor) -> None:
    rows.baddbmm_(left, right)


torch.library.register_fake("coterie::add_product", lambda rows, left, right: None)


class Taps:
    """The taps of one module, which keeps the hooks; they do nothing while no call is under way."""

    def __init__(self, module: nn.Module, layers: dict[str, tuple[int, ...]]) -> None:
        self.module = module
        self.layers = layers  # name → shape of its output for one sample
        self._zeros: dict[str, Tensor] | None = None
        self._seen: dict[str, Tensor] = {}
        for name in layers:
            self._watch(name, module.get_submodule(name))

    @classmethod
    def of(cls, module: nn.Module, task: Task, x: Tensor, y: Tensor, dtype: torch.dtype) -> "Taps":
        """Taps at the layers where the product was seen to be the gradient, on a batch of samples.

        A weight that is used twice, or outside its layer, fails the comparison and is trained like any other.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        calls: dict[str, int] = {}
        handles = []
        for name, layer in module.named_modules():
            if type(layer) is nn.Linear and layer.weight.requires_grad and layer.weight.numel() >= LEAST:

                def note(_layer: nn.Module, _given: object, out: Tensor, name: str = name) -> None:
                    calls[name] = calls.get(name, 0) + 1
                    shapes[name] = tuple(out.shape)

                handles.append(layer.register_forward_hook(note))
        state = {
            name: v.detach().clone().to(dtype if v.is_floating_point() else v.dtype)
            for name, v in [*module.named_parameters(), *module.named_buffers()]
        }
        try:
            functional_call(module, state, (x,))
        finally:
            for handle in handles:
                handle.remove()
        once = {n: s[1:] for n, s in shapes.items() if calls[n] == 1 and len(s) > 1 and s[0] == len(x)}
        taps = cls(module, once)
        weights = {f"{name}.weight": state[f"{name}.weight"].requires_grad_() for name in once}
        zeros = {name: z[0].requires_grad_() for name, z in taps.zeros(1, x[None], state).items()}
        out, seen = taps.call(state, x, zeros)
        if once:
            loss = task.loss(logits_of(out), y).mean()
            known = torch.autograd.grad(loss, [*weights.values(), *zeros.values()], allow_unused=True)
            for name, gradient, back in zip(tuple(once), known[: len(once)], known[len(once) :], strict=True):
                product = None if back is None else back.flatten(0, -2).T @ seen[name].flatten(0, -2)
                if gradient is None or product is None or not torch.allclose(gradient, product, rtol=1e-3, atol=1e-6):
                    del taps.layers[name]
        return taps

    def zeros(self, rows: int, x: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is added to each layer's output: rows × samples × its shape."""
        return {
            name: parameters[f"{name}.weight"].new_zeros(rows, x.shape[1], *shape)
            for name, shape in self.layers.items()
        }

    def call(self, state: dict[str, Tensor], x: Tensor, zeros: dict[str, Tensor]) -> tuple[object, dict[str, Tensor]]:
        """The module's output, and what went into each tapped layer."""
        self._zeros, self._seen = zeros, {}
        try:
            out = functional_call(self.module, state, (x,))
            return out, self._seen
        finally:
            self._zeros, self._seen = None, {}

    def descend(
        self, parameters: dict[str, Tensor], back: dict[str, Tensor], seen: dict[str, Tensor], rate: float | Tensor
    ) -> None:
        """One step of SGD on the tapped weights of every row, in place."""
        for name in self.layers:
            left = (back[name] * -rate).flatten(1, -2).mT
            torch.ops.coterie.add_product(parameters[f"{name}.weight"], left, seen[name].flatten(1, -2))

    def _watch(self, name: str, layer: nn.Module) -> None:
        def hook(_layer: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
            if self._zeros is None or name not in self._zeros:
                return out
            self._seen[name] = given[0]
            return out + self._zeros[name]

        layer.register_forward_hook(hook)
