"""Runs: the runner, its record on disk, checkpoints and sweeps."""
