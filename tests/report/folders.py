"""Folders of runs in the record's format, written without the runner."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file as save_arrays


def write_run(
    out: Path,
    algorithm: str,
    seed: int,
    accuracy: Sequence[float],
    *,
    rounds: Sequence[int] = (1, 2, 4, 8),
    graphs: dict[str, np.ndarray] | None = None,
    sent: int = 0,
    last: Sequence[float] | None = None,
    **about: Any,
) -> Path:
    """One finished run whose clients end with these accuracies."""
    final = np.asarray(accuracy, dtype=float)
    run = out / algorithm / f"seed-{seed}"
    run.mkdir(parents=True)
    keys = [f"client-{i:0{len(str(len(final) - 1))}d}" for i in range(len(final))]
    told = {
        "format": 1,
        "status": "finished",
        "experiment": "toy",
        "scale": "small",
        "algorithm": algorithm,
        "settings": {"plan": {"steps": 5, "lr": 0.1}},
        "seed": seed,
        "batch": [seed],
        "rounds": max(rounds),
        "keys": keys,
        "groups": None,
        "sizes": {"train": [10] * len(final), "validation": [5] * len(final), "test": [20] * len(final)},
        "task": "classification",
        "main": "accuracy",
        "higher": True,
        "resplit": False,
        "facts": {"data": "digits"},
        "versions": {"coterie": "0.1.0", "torch": "2.13", "python": "3.11"},
        "seconds": 1.5,
    } | about
    (run / "run.json").write_text(json.dumps(told))
    ending = final if last is None else np.asarray(last, dtype=float)
    result = {
        "algorithm": algorithm,
        "seed": seed,
        "metrics": {
            "loss": float(1 - final.mean()),
            told["main"]: float(final.mean()),
            f"{told['main']}_std_clients": float(final.std()),
            "worst_client": float(final.min()),
            "share_improved": None,
        },
        "last": {told["main"]: float(ending.mean())},
        "clients": {told["main"]: final.tolist()},
        "clients_last": {told["main"]: ending.tolist()},
        "ledger": {
            "sent": {"up": {"numbers": sent, "bytes": 4 * sent}, "down": {"numbers": sent, "bytes": 4 * sent}},
            "broadcast": {"up": {"numbers": sent, "bytes": 4 * sent}, "down": {"numbers": 10, "bytes": 40}},
        },
        "seconds": 1.5,
        "run": str(run),
        "rounds_run": max(rounds),
    }
    (run / "result.json").write_text(json.dumps(result))
    with (run / "metrics.jsonl").open("w") as lines:
        for t in rounds:
            values = ending * (1 - 0.8 * np.exp(-3 * t / max(rounds)))
            for split in ("validation", "test"):
                clients = {"loss": (1.2 - values).tolist(), told["main"]: values.tolist()}
                mean = {name: float(np.mean(each)) for name, each in clients.items()}
                line = {"round": t, "kind": "evaluation", "models": "personal", "split": split}
                lines.write(json.dumps({**line, "clients": clients, "mean": mean, "weighted": mean}) + "\n")
            lines.write(json.dumps({"round": t, "kind": "training", "loss": [1.0], "ok": [True], "extra": {}}) + "\n")
    if graphs:
        save_arrays(
            {k: np.ascontiguousarray(w, dtype=np.float32) for k, w in graphs.items()}, run / "graphs.safetensors"
        )
    return run
