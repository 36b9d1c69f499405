"""One thread a process: the suite runs several processes, and small tensors lose by sharing cores."""

import torch

torch.set_num_threads(1)
