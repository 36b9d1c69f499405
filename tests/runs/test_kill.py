"""A real process, killed without warning at 20 random times, ends with the numbers of one that never was."""

import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "import torch; torch.set_num_threads(1); from coterie.cli import main; main()"]
KILLS, LIVES = 20, 5  # kills in all, and in each of the runs that go on from one another
BYTES = ("metrics.jsonl", "graphs.safetensors", "models/best.safetensors", "models/last.safetensors")
ALGORITHMS = ("local", "finetuned_fedavg")


def outcome(out: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for algorithm in ALGORITHMS:
        folder = out / algorithm / "seed-0"
        result = json.loads((folder / "result.json").read_text())
        found[algorithm] = {k: v for k, v in result.items() if k not in ("seconds", "run")}
        found |= {f"{algorithm}/{name}": (folder / name).read_bytes() for name in BYTES}
    return found


def times(out: Path) -> dict[Path, int]:
    """When each run was last written to."""
    found = {}
    for path in out.glob("*/*/*"):
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return found


def killed(tiny: str, out: Path, seconds: list[float]) -> int:
    """Start, kill, go on, kill … and go on to the end; how often a kill met a living process."""
    first = [*COMMAND, "run", tiny, "--algorithms", ",".join(ALGORITHMS), "--set", "run.rounds=60", "--out", str(out)]
    hits = 0
    for wait in seconds:
        begun = (out / "experiment.json").exists()
        process = subprocess.Popen([*COMMAND, "resume", str(out)] if begun else first, stdout=subprocess.DEVNULL)
        while not (out / ".lock").exists() and process.poll() is None:
            time.sleep(0.01)
        before = times(out)
        while process.poll() is None and before == times(out):
            time.sleep(0.01)  # imports are over when something is written
        time.sleep(wait)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            hits += 1
        process.wait()
    subprocess.run([*COMMAND, "resume", str(out)], check=True, stdout=subprocess.DEVNULL)
    return hits


@pytest.mark.full
def test_killed_at_any_time_it_ends_with_the_same_numbers(tiny: str, tmp_path: Path):
    whole = tmp_path / "whole"
    options = ["--algorithms", ",".join(ALGORITHMS), "--set", "run.rounds=60", "--out", str(whole)]
    subprocess.run([*COMMAND, "run", tiny, *options], check=True, stdout=subprocess.DEVNULL)
    seconds = sum(json.loads((whole / a / "seed-0" / "result.json").read_text())["seconds"] for a in ALGORITHMS)
    draw = random.Random(0)
    waits = [[draw.uniform(0, 1.5 * seconds / LIVES) for _ in range(LIVES)] for _ in range(KILLS // LIVES)]
    outs = [tmp_path / f"killed-{i}" for i in range(len(waits))]
    with ThreadPoolExecutor(2) as pool:
        hits = list(pool.map(killed, [tiny] * len(outs), outs, waits))
    assert sum(hits) >= KILLS // 2, hits
    for out in outs:
        assert outcome(out) == outcome(whole)
