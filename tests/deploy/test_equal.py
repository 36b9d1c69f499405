"""Real processes give the simulator's numbers: every algorithm, data from tables and from image folders."""

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import actors
from coterie.data import holding
from coterie.experiments import reader
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet
from coterie.runs.runner import Outcome, drive
from coterie.sites.folder import schema
from deployment import COTERIE, Deployment, Sources

pytestmark = pytest.mark.full

THREE = ("north", "south", "west")
TABLES = """
name = "tables"
[population]
kind = "sites"
clients = {clients}
model = {{ name = "mlp", sizes = [4, 12, 3] }}
[population.data]
columns = ["age", "dose", "height", "weight"]
target = "outcome"
classes = ["better", "same", "worse"]
missing = "mean"
scale = "client"
validation = 0.25
test = 0.25
[run]
rounds = {rounds}
evaluate_every = {rounds}
checkpoint_every = 1
seeds = [5]
dtype = "float64"
"""

EVERYTHING = """
[plan]
steps = 4
batch = 8
lr = 0.1
[algorithms.fedavg]
[algorithms.cobo]
local_steps = 3
batch = 8
schedule = "all"
[algorithms.ditto]
[algorithms.meritfed-zo]
lr = 0.1
batch = 8
steps = 1
alpha = 0.5
targets = ["south"]
[algorithms.scool-sbm]
batch = 16
warmup = 2
settings = { communities = 2 }
"""

PICTURES = """
name = "pictures"
[population]
kind = "sites"
clients = ["north", "south", "west"]
model = { name = "mlp", sizes = [64, 8, 2] }
data = { shape = [1, 8, 8], dtype = "uint8", classes = ["bright", "dark"], validation = 0.2, test = 0.2 }
[run]
rounds = 3
evaluate_every = 3
checkpoint_every = 1
seeds = [7]
dtype = "float64"
[algorithms.allforone]
batch = 8
b_alpha = 16
refresh = 2
lam = 0.01
"""

MIXED = """
name = "mixed"
[population]
kind = "sites"
clients = ["north", "south", "west"]
model = [{{ name = "mlp", sizes = [64, 8, 2] }}, {{ name = "cnn", channels = 1, classes = 2, size = 8 }}]
data = {{ shape = [1, 8, 8], dtype = "uint8", classes = ["bright", "dark"], validation = 0.2, test = 0.2 }}
public = {{ public = {{ samples = {samples}, sha256 = "{sha256}" }} }}
[run]
rounds = 3
evaluate_every = 3
checkpoint_every = 1
seeds = [9]
dtype = "float64"
[algorithms.comet]
plan = {{ steps = 4, batch = 8, lr = 0.1 }}
c = 2
public_batch = 8
"""


def experiment(algorithms: str, clients: Sequence[str] = THREE, rounds: int = 3) -> str:
    """One about tables."""
    return TABLES.format(clients=json.dumps(clients), rounds=rounds) + algorithms


def table(path: Path, seed: int) -> Path:
    """A client's table, with a gap and columns that the experiment does not name."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        lines = csv.writer(file, delimiter=";")
        lines.writerow(["id", "weight", "height", "outcome", "age", "dose"])
        for i in range(64):
            kind = draw.randrange(3)
            a, b, c, d = (round(draw.gauss(kind * (j - seed % 2), 1), 3) for j in range(4))
            lines.writerow([i, a, b, ("better", "same", "worse")[kind], "NA" if i == 3 else c, d])
    return path


def pictures(folder: Path, seed: int) -> Path:
    """A client's image folder."""
    draw = random.Random(seed)
    for kind, low in (("dark", 0), ("bright", 90 + 40 * (seed % 2))):
        (folder / kind).mkdir(parents=True)
        for i in range(25):
            image = Image.new("L", (8, 8))
            image.putdata([draw.randrange(low, low + 120) for _ in range(64)])
            image.save(folder / kind / f"{i:02}.png")
    return folder


def of_tables(root: Path, *clients: str) -> dict[str, Sources]:
    """A site with a table for each."""
    root.mkdir(parents=True, exist_ok=True)
    return {f"at-{n}": {n: ("csv", table(root / f"{n}.csv", i))} for i, n in enumerate(clients)}


def of_pictures(root: Path, *clients: str) -> dict[str, Sources]:
    """A site with an image folder for each."""
    return {f"at-{n}": {n: ("images", pictures(root / n, i))} for i, n in enumerate(clients)}


# ---- what a simulator makes of the same ------------------------------------------------------------------------------


def simulated(deployment: Deployment, name: str, around: Callable[[Fleet], Fleet] = lambda fleet: fleet) -> Outcome:
    """The run that a deployment should have been, by the simulator that shares least with it."""
    experiment = reader.read(str(deployment.given))
    wanted, everyone = schema(experiment), experiment.population(0)
    found = {c: s for clients in deployment.sites.values() for c, s in clients.items()}
    samples = {c: holding.read(*map(str, found[c]), wanted, c).samples for c in everyone.keys}
    public = {name: load_file(deployment.root / f"{name}.safetensors")["inputs"] for name in everyone.public}
    held = holding.hold(everyone, samples, public)
    fleet = StackedFleet(held, seed=experiment.budget.seeds[0], dtype=getattr(torch, experiment.budget.dtype))
    algorithm = experiment.algorithm(name, **held.told)
    return drive(around(fleet), algorithm, experiment.budget, name=name)


def record(deployment: Deployment, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    """Result, graphs and models as a deployment has written them."""
    (folder,) = (deployment.out / name).glob("seed-*")
    models = {which: load_file(folder / "models" / f"{which}.safetensors") for which in ("best", "last")}
    return json.loads((folder / "result.json").read_text()), load_file(folder / "graphs.safetensors"), models


def compare(deployment: Deployment, name: str, expected: Outcome, always: Sequence[str] = ()) -> None:
    """Metrics, graph and models of all clients to 1e-9, and what the ledger says.

    Where only some were `always` there, that holds for how it ended; their best round, theirs alone, and no ledger.
    """
    result, graphs, models = record(deployment, name)
    keys = deployment.clients
    chosen = {"last": keys, "best": always or keys}
    for when, which in (("clients", "best"), ("clients_last", "last")):
        for metric, values in expected.result[when].items():
            for i, key in enumerate(keys):  # whoever is away when models are measured has no metrics
                if key in chosen[which]:
                    assert result[when][metric][i] in (None, pytest.approx(values[i], abs=1e-9)), (key, when, metric)
    for which, rows in expected.models.items():
        for key in chosen[which]:
            mark = f"{key}/row"
            torch.testing.assert_close(models[which][mark], rows[mark], rtol=0, atol=1e-9)
    assert expected.graph is not None
    last = graphs[max(graphs)]  # in float32, as records hold graphs
    torch.testing.assert_close(last, expected.graph.float().cpu(), rtol=0, atol=1e-7)
    if not always:
        assert None not in result["clients_last"][metric]
        assert result["ledger"] == expected.result["ledger"]


def payload(deployment: Deployment, name: str) -> dict[str, int]:
    """What really went to and from all sites, in bytes, for what the ledger counts."""
    lines = [n for site in deployment.sites for n in actors.notes(deployment.place(site)) if n["run"].endswith(name)]
    return {what: sum(n[what] for n in lines if n["kind"] == "ask") for what in ("down", "up", "came", "went")} | {
        "messages": sum(n["kind"] == "ask" for n in lines)
    }


FRAMING = 6_000  # bytes of a message that are no payload: names, indices, plans, what came beside, and reasons


def check(deployment: Deployment, name: str) -> None:
    """Equal to the simulator, and the ledger equal to what was sent."""
    compare(deployment, name, simulated(deployment, name))
    sent, real = record(deployment, name)[0]["ledger"]["sent"], payload(deployment, name)
    assert (real["down"], real["up"]) == (sent["down"]["bytes"], sent["up"]["bytes"])
    for way, whole in (("down", "came"), ("up", "went")):
        assert real[way] < real[whole] < real[way] + FRAMING * real["messages"]


def served(deployment: Deployment, coterie: Callable[..., str], *public: Path) -> None:
    """Sites prepared and joined, the experiment served to its end."""
    deployment.prepare(coterie, *public)
    for site in deployment.sites:
        deployment.join(site)
    words = ["serve", str(deployment.given), "--out", str(deployment.out), "--port", str(deployment.port)]
    server = deployment.start("serve", [*COTERIE, *words])
    deployment.until("the experiment's end", lambda: server.poll() is not None)
    assert server.returncode == 0, deployment.logs()


def test_tables_at_three_sites_give_the_simulators_numbers(tmp_path: Path):
    with Deployment(tmp_path / "d", experiment(EVERYTHING), of_tables(tmp_path, *THREE)) as deployment:
        served(deployment, deployment.coterie)
        for name in reader.read(str(deployment.given)).algorithms:
            check(deployment, name)


def test_image_folders_at_three_sites_give_the_simulators_numbers(tmp_path: Path):
    with Deployment(tmp_path / "d", PICTURES, of_pictures(tmp_path / "data", *THREE)) as deployment:
        served(deployment, deployment.inside)
        for name in reader.read(str(deployment.given)).algorithms:
            check(deployment, name)


def test_models_of_two_kinds_at_three_sites_learn_from_predictions_as_in_the_simulator(tmp_path: Path):
    file = tmp_path / "d" / "public.safetensors"
    file.parent.mkdir()
    pixels = torch.randint(0, 256, (24, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    save_file({"inputs": pixels}, file)
    said = MIXED.format(samples=len(pixels), sha256=holding.digest(file))
    with Deployment(tmp_path / "d", said, of_pictures(tmp_path / "data", *THREE)) as deployment:
        served(deployment, deployment.inside, file)
        check(deployment, "comet")


def test_in_single_precision_metrics_and_traffic_are_the_simulators(tmp_path: Path):
    """Rows differ in their last digits there, and no more is asked of them."""
    text = PICTURES.partition("[algorithms")[0].replace("float64", "float32")
    plan = "[plan]\nsteps = 4\nbatch = 8\nlr = 0.1\n[algorithms.fedavg]\n"
    with Deployment(tmp_path / "d", text + plan, of_pictures(tmp_path / "data", *THREE)) as deployment:
        served(deployment, deployment.inside)
        expected, (result, _, _) = simulated(deployment, "fedavg").result, record(deployment, "fedavg")
        assert result["last"]["loss"] == pytest.approx(expected["last"]["loss"], abs=1e-4)
        assert result["last"]["accuracy"] == pytest.approx(expected["last"]["accuracy"], abs=0.05)
        assert result["ledger"] == expected["ledger"]
        sent, real = result["ledger"]["sent"], payload(deployment, "fedavg")
        assert (real["down"], real["up"]) == (sent["down"]["bytes"], sent["up"]["bytes"])
