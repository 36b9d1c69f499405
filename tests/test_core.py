"""The core runs with its own requirements and nothing else: what a GPU machine may have."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CORE = {"torch", "numpy", "scipy", "scikit-learn", "safetensors", "typer", "rich", "matplotlib"}
ALONE = """
import importlib, json, pkgutil, sys
blocked = set(json.loads(sys.argv[1]))

class Without:  # a finder that does not find what is blocked
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import coterie
for module in pkgutil.walk_packages(coterie.__path__, "coterie."):
    if module.name != "coterie.sites.node":  # which is only ever loaded by Flower
        importlib.import_module(module.name)
from coterie.cli import main
sys.argv = ["coterie", "run", "quickstart", "--scale", "smoke", "--algorithms", "local,cobo", "--out", sys.argv[2]]
main()
"""


def required(names: set[str]) -> set[str]:
    """These distributions and all that they require here."""
    found: set[str] = set()
    left = set(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.add(canonicalize_name(need.name))
    return found


def test_everything_imports_and_runs_with_the_core_alone(tmp_path: Path) -> None:
    allowed = required(CORE)
    declared = {canonicalize_name(Requirement(line).name) for line in metadata.requires("coterie") or ()
                if "extra ==" not in line}  # fmt: skip
    assert CORE <= declared <= allowed  # filelock comes with torch
    homes = metadata.packages_distributions()
    blocked = [
        module
        for module, owners in homes.items()
        if module not in sys.stdlib_module_names
        and module != "coterie"
        and not {canonicalize_name(owner) for owner in owners} & (allowed | {"coterie"})
    ]
    assert {"flwr", "transformers", "tokenizers", "peft", "pydantic", "onnx", "tensorboard"} <= {*blocked}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(blocked), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([*(tmp_path / "run").glob("*/seed-*/result.json")]) >= 2, done.stdout
