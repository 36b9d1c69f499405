"""StackedFleet: the simulator's door. Out of memory is caught here, and an ask is begun again."""

import warnings

import torch
from torch import Tensor

from coterie.asks import Answer, Ask, Evaluate, Fit, Gradient, Loss, Predict
from coterie.data.population import Population
from coterie.errors import DeviceError
from coterie.fleet.base import Fleet
from coterie.fleet.stacked.batches import Batches
from coterie.fleet.stacked.chunks import Chunks, out_of_memory
from coterie.fleet.stacked.compute import Compute
from coterie.fleet.stacked.memory import Memory
from coterie.fleet.stacked.outputs import Outputs
from coterie.fleet.stacked.parts import Parts
from coterie.fleet.stacked.samples import Samples
from coterie.fleet.stacked.stack import Now, Rows, Stack
from coterie.fleet.stacked.training import Training


class StackedFleet(Fleet):
    """The simulator. Populations of several architectures are several stacks, answered in turn in the same phase.

    `compile` is True on a GPU unless told otherwise, or the name of one of torch.compile's backends; `chunk` (rows at
    once) is what fits in memory; `autocast` the lower precision of forward passes, such as torch.bfloat16.
    """

    def __init__(
        self,
        population: Population,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        compile: bool | str | None = None,
        chunk: int | None = None,
    ) -> None:
        device = torch.device(device)
        super().__init__(population, seed=seed, device=device, dtype=dtype)
        compiled = device.type == "cuda" if compile is None else compile
        memory = Memory(device, self._initial)
        samples = Samples(population, device, dtype, memory)
        stacks = [
            Stack.of(a, population, self._architecture, self._ids, module, layout, device)
            for a, (module, layout) in enumerate(zip(self._modules, self._layouts, strict=True))
        ]
        chunks = Chunks(samples, bool(compiled), chunk)
        compute = Compute(population.task, device, autocast, compiled)
        self.parts = Parts(population, device, dtype, self._architecture, stacks, memory, samples, chunks, compute)
        self._outputs = Outputs(self.parts)
        self._batches = Batches(self.parts, self._outputs)
        self._training = Training(self.parts, self._outputs)

    # ---- what clients remember ---------------------------------------------------------------------------------------

    def _kept(self) -> Rows:
        return self.parts.memory.kept

    def _restore(self, kept: Rows) -> None:
        self.parts.memory.restore(kept)

    def buffers_of(self, client: int, memory: str) -> Rows:
        """The buffers a client keeps under a memory."""
        stack = self.parts.stacks[int(self._architecture[client])]
        found = self.parts.memory.buffers(stack, memory, stack.local[client : client + 1])
        return {name: value[0] for name, value in found.items()}

    # ---- the five asks -----------------------------------------------------------------------------------------------

    def _answer(self, ask: Ask, place: int) -> Answer:
        """Out of memory halves the chunk and begins the ask again; nobody remembers the try that failed."""
        chunks, memory = self.parts.chunks, self.parts.memory
        while True:
            before = memory.begin()
            try:
                with self.parts.compute.never_eager():
                    return super()._answer(ask, place)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not out_of_memory(error):
                    raise
                why = str(error).partition("\n")[0]
            memory.restore(before)  # outside of the handler, whose traceback holds tensors
            rows = min(chunks.tried, ask.m)
            if rows < 2:
                raise DeviceError(f"not even one model and its batch fit in memory: {why}")
            chunks.most = rows // 2
            warnings.warn(f"out of memory with {rows} models at once: going on with {chunks.most}", stacklevel=2)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _now(self, place: int) -> Now:
        return Now(self.seed, self.t, place)

    def _gradient(self, ask: Gradient, place: int) -> Answer:
        width = ask.models.shape[1] if isinstance(ask.models, Tensor) else 0
        return self._batches.gradient(ask, int(self._widths[ask.clients[0]]) if ask.m else width, self._now(place))

    def _loss(self, ask: Loss, place: int) -> Answer:
        return self._batches.loss(ask, self._now(place))

    def _fit(self, ask: Fit, place: int) -> Answer:
        return self._training.fit(ask, self._now(place))

    def _predict(self, ask: Predict) -> Answer:
        return self._outputs.predict(ask)

    def _evaluate(self, ask: Evaluate) -> Answer:
        return self._outputs.evaluate(ask)
