"""How well `coterie show` foresees what `coterie run` takes: time and peak memory, foreseen over measured.

    python benchmarks/forecast.py [--device cpu|cuda] [--clock wall|process] [--json FILE] [CASE …]

A case is the arguments of both commands in one word, with commas: quickstart,--seeds,0. On a machine that others use as
well, whose load is another one a minute later, both commands can be told to read the processor's clock (and with
OMP_NUM_THREADS=1 that of one thread): what is compared is then what the work takes, not how long it has to wait.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = [
    "quickstart",
    "cobo-cross-silo,--scale,small,--algorithms,local;cobo;fedavg",
    "afo-mnist,--scale,small,--algorithms,local;allforone-bin",
    "scool-sbm,--scale,small,--algorithms,local;scool-sbm",
    "cobo-quadratic",
]
RUN = "from coterie.cli import main; main()"
CLOCKS = {"wall": "", "process": "import time; time.perf_counter = time.process_time; "}
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "k": 1e3, "M": 1e6, "G": 1e9, "": 1.0}


def foreseen(text: str) -> tuple[float, float]:
    found = re.search(r"# in all: ([\d.e+]+) (\w+) .*, ([\d.]+) (\w?)B at", text)
    assert found is not None, text[-500:]
    return float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]


def measured(command: list[str], arguments: list[str], out: Path) -> tuple[float, float]:
    process = subprocess.Popen([*command, "run", *arguments, "--out", str(out)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    runs = [json.loads(path.read_text()) for path in out.glob("*/seed-*/run.json")]
    together: dict[tuple[Any, ...], float] = {}  # seeds that ran side by side share their seconds
    for run in runs:
        mark = (run["algorithm"], tuple(run["batch"]))
        together[mark] = max(together.get(mark, 0.0), run["seconds"])
    return sum(together.values()), usage.ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    options = parser.parse_args()
    command, report = [sys.executable, "-c", CLOCKS[options.clock] + RUN], []
    for case in options.cases:
        arguments = [word.replace(";", ",") for word in case.split(",")] + ["--device", options.device]
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            shown = subprocess.run([*command, "show", *arguments], capture_output=True, text=True, check=True).stdout
            took = time.perf_counter() - start
            (seconds, memory), (real, peak) = foreseen(shown), measured(command, arguments, Path(folder) / "run")
        found = {
            "case": " ".join(arguments),
            "seconds": real,
            "seconds foreseen over measured": seconds / real,
            "peak GB": peak / 1e9,
            "peak foreseen over measured": memory / peak,
            "seconds to foresee": took,
        }
        report.append(found)
        print(json.dumps(found), flush=True)
    if options.json:
        made = shlex.join(["python", "benchmarks/forecast.py", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": made, "cases": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
