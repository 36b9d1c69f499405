"""The simulator: all clients of one architecture as one batched computation, on the CPU or one GPU.

`stack` is who they are, `memory` what they remember, `samples` what they hold and draw (`streams`), `chunks` how many
are computed at once, `compute` one model's arithmetic made that of many (`taps`, `optimiser`). `parts` is
all of these. `batches` answers Gradient and Loss, `outputs` Predict and Evaluate, `training` (with `distillation`) Fit;
`fleet` is the door.
"""

from coterie.fleet.stacked.fleet import StackedFleet

__all__ = ["StackedFleet"]
