from pathlib import Path

import pytest

TINY = """
name = "tiny"
scale = "small"
[population]
data = "digits"
partition = { name = "permuted_clusters", clusters = 2, clients_per_cluster = 2, share = 0.05, validation = 0.4 }
model = { name = "mlp", sizes = [64, 8, 10] }
[run]
rounds = 6
evaluate_every = 2
checkpoint_every = 1
seeds = [0]
[plan]
steps = 2
batch = 8
lr = 0.2
momentum = 0.5
keep_optimiser = true
sampling = "epoch"
schedule = "cosine"
[algorithms.local]
[algorithms.fedavg]
[algorithms.finetuned_fedavg]
finetune = 0.5
[algorithms.oracle]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)
