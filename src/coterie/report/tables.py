"""Tables of finished runs: one row for each algorithm, for the terminal, for Markdown and for LaTeX.

Three kinds of spread are never mixed: ± is over seeds; "spread" is over clients, within a seed; and a client is better
off than alone where its own value beats that of `local` with the same seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from coterie.report.numbers import NOTHING, human, title, unit, value
from coterie.report.reading import finished, runs

Result = dict[str, Any]
HELPED = "After the last round, for each client that is helped; and where its weight is, in per cent by true group."
REFERENCE = "local"  # what collaboration must beat
BOUND = "oracle"  # is told the true groups, so it wins nothing


def collect(folders: Iterable[str | Path]) -> list[Result]:
    """The result of every run at or below these folders; what the run says of itself lies under "about"."""
    return [finished(run) for run in runs(folders)]


def for_json(results: Sequence[Result]) -> list[Result]:
    """The same for a JSON file, where `share_improved` counts local runs of all the folders."""
    made = []
    for result in results:
        shares = {"metrics": better_off(result, results), "last": better_off(result, results, "clients_last")}
        tables = {table: {**result[table], "share_improved": share} for table, share in shares.items()}
        made.append({k: v for k, v in result.items() if k != "about"} | tables)
    return made


@dataclass(frozen=True)
class Row:
    """One algorithm, over its seeds."""

    algorithm: str
    name: str  # the algorithm, with its folder where several hold it
    best: list[float]  # a value for each seed: mean over clients, each at its best validation round
    last: list[float]  # the same at the end
    spread: float  # standard deviation over clients, mean over seeds
    worst: float  # the worst client, mean over seeds
    better: float | None  # share of clients better off than alone, mean over the seeds that have a local run
    sent: float  # numbers up and down, mean over seeds
    broadcast: float
    seeds: tuple[int, ...]
    train: float | None  # the models of `best` on training data, mean over seeds, where it was measured
    targets: list[dict[str, Any]]  # for each seed, what those who are helped have in the end
    on_attackers: float | None  # the share of honest clients' weight that attackers have in the end, mean over seeds

    @property
    def mean(self) -> float:
        """Over seeds."""
        return _mean(self.best)


@dataclass(frozen=True)
class Comparison:
    """The runs of one experiment that can stand in one table."""

    experiment: str
    scale: str
    data: str
    judged: str  # the split that the numbers are of
    split: str  # whose division into training and test data
    clients: int
    main: str
    higher: bool
    results: list[Result]
    rows: list[Row]

    @classmethod
    def of(cls, results: list[Result]) -> "Comparison":
        """Of results whose runs are `_alike`."""
        experiment, scale, data, judged, split, clients, main, higher = _alike(results[0])
        return cls(experiment, scale, data, judged, split, clients, main, higher, results, _rows(results))

    @property
    def winner(self) -> Row | None:
        """The best of those that were not told the truth."""
        fair = [r for r in self.rows if not r.algorithm.endswith(BOUND) and np.isfinite(r.mean)]
        return (max if self.higher else min)(fair, key=lambda r: r.mean, default=None)

    @property
    def people(self) -> str:
        """On which data, and how many clients."""
        return f"{self.data}, {self.clients} client{'s' * (self.clients != 1)}"

    @property
    def head(self) -> str:
        """What is compared, in a line."""
        return f"{self.experiment} (scale {self.scale}): {self.people}, {_seeds(self.rows)}"

    @property
    def foot(self) -> str:
        """How to read the numbers."""
        over = "mean ± std over seeds" if any(len(r.best) > 1 for r in self.rows) else "one seed"
        honest = "; attackers do not count, and beside it is the weight they have in the end" if self.attacked else ""
        also = "the same on training data, the difference, and " if self.trained else ""
        return (
            f"On {self.judged} data, mean over clients, {over}{honest}; each client's model of its best validation "
            f"round, and beside it {also}that of the last round. Spread: std over clients. Better off: share of "
            "clients that do better than alone. Numbers moved up and down: sent counts every copy, broadcast each "
            f"distinct one once. Split: {self.split}."
        )

    @property
    def columns(self) -> list[str]:
        """The header."""
        named = title(self.main)
        more = ["on attackers"] * self.attacked + ["train", "gap"] * self.trained
        return ["algorithm", named, *more, "last round", "spread", "worst client", "better off", "sent", "broadcast"]

    @property
    def helped(self) -> tuple[list[str], list[list[str]]]:
        """Where some are helped and the others only help: a header, and a row for each algorithm; else nothing."""
        first = self.rows[0].targets[0]
        if not first or not all("mass" in told for told in first.values()):
            return [], []
        lines = []
        for row in self.rows:
            cells = [row.name]
            for key in first:
                told = [targets[key] for targets in row.targets]
                shares = [_mean([100 * t["mass"][g] for t in told]) for g in told[0]["mass"]]
                values = _over_seeds(self.main, [_number(t[self.main]) for t in told])
                cells.append(f"{values}; {' / '.join(f'{share:.0f}' for share in shares)}")
            lines.append(cells)
        return ["algorithm", *(f"{title(self.main)} for {key}" for key in first)], lines

    @property
    def trained(self) -> bool:
        """Whether training data were measured too."""
        return any(row.train is not None for row in self.rows)

    @property
    def attacked(self) -> bool:
        """Whether some clients attack, or are left out as if they did."""
        return any(row.on_attackers is not None for row in self.rows)

    def cells(self, row: Row) -> list[str]:
        """One row as text."""
        uneven = len({r.seeds for r in self.rows}) > 1
        return [
            row.name + (f" ({len(row.seeds)} seed{'s' * (len(row.seeds) > 1)})" if uneven else ""),
            _over_seeds(self.main, row.best),
            *[NOTHING if row.on_attackers is None else f"{100 * row.on_attackers:.1f} %"] * self.attacked,
            *[NOTHING if v is None else value(self.main, v) for v in _gap(row)] * self.trained,
            _over_seeds(self.main, row.last),
            value(self.main, row.spread),
            value(self.main, row.worst),
            NOTHING if row.better is None else f"{100 * row.better:.0f} %",
            human(row.sent),
            human(row.broadcast),
        ]


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """The results in groups that can be compared: the same experiment, scale, data, split and number of clients."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(_alike(result), []).append(result)
    return [Comparison.of(members) for members in groups.values()]


def _alike(result: Result) -> tuple[str, str, str, str, str, int, str, bool]:
    """What runs must share to stand in one table."""
    told = result["about"]
    facts = told.get("facts") or {}
    data = str(facts.get("data", "generated data"))
    split = str(facts.get("division", "the publisher's" if "data" in facts else "as the clients have it"))
    if told["resplit"]:
        split = "not the publisher's (resplit)" + (f": {split}" if "division" in facts else "")
    judged = str(result.get("split", "test"))
    return told["experiment"], told["scale"], data, judged, split, len(told["keys"]), told["main"], bool(told["higher"])


def table(results: Sequence[Result]) -> Group:
    """For the terminal; one table for each experiment, to be printed as one."""
    made = []
    for each in comparisons(results):
        drawn = Table(
            title=escape(each.head),
            caption=escape(each.foot),
            title_justify="left",
            caption_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for place, column in enumerate(each.columns):
            head = column.replace(" ", "\n").replace("broadcast", "broad-\ncast")  # 80 columns must do
            drawn.add_column(escape(head), justify="right" if place else "left", no_wrap=True, vertical="bottom")
        for row in each.rows:
            drawn.add_row(*map(escape, each.cells(row)), style="bold" if row is each.winner else "")
        made.append(drawn)
        names, lines = each.helped
        if lines:
            more = Table(caption=HELPED, caption_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
            for place, column in enumerate(names):
                more.add_column(escape(column.replace(" for ", "\nfor ")), justify="right" if place else "left")
            for cells in lines:
                more.add_row(*map(escape, cells))
            made.append(more)
    return Group(*made)


def markdown(results: Sequence[Result]) -> str:
    """As Markdown, the best in bold."""
    parts = []
    for each in comparisons(results):
        text = [f"**{each.head}**", "", _pipe(each.columns), "|:--|" + "--:|" * (len(each.columns) - 1)]
        for row in each.rows:
            cells = [cell.replace("|", "\\|") for cell in each.cells(row)]
            text.append(_pipe([cells[0], f"**{cells[1]}**", *cells[2:]] if row is each.winner else cells))
        parts.append("\n".join([*text, "", each.foot, ""]))
        head, lines = each.helped
        if lines:
            rule = "|:--|" + "--:|" * (len(head) - 1)
            parts.append("\n".join([_pipe(head), rule, *map(_pipe, lines), "", HELPED, ""]))
    return "\n".join(parts)


def latex(results: Sequence[Result]) -> str:
    """As LaTeX, for `booktabs`, the best in bold."""
    parts = []
    for each in comparisons(results):
        text = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(each.head)}. {_tex(each.foot)}}}"]
        text += [rf"\begin{{tabular}}{{l{'r' * (len(each.columns) - 1)}}}", r"\toprule"]
        text += [" & ".join(map(_tex, each.columns)) + r" \\", r"\midrule"]
        for row in each.rows:
            cells = [_tex(cell) for cell in each.cells(row)]
            if row is each.winner:
                cells[1] = rf"\textbf{{{cells[1]}}}"
            text.append(" & ".join(cells) + r" \\")
        parts.append("\n".join([*text, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]))
    return "\n".join(parts)


def better_off(result: Result, results: Iterable[Result], clients: str = "clients") -> float | None:
    """The share of a run's clients that do better than in the local run of the same experiment, folder first, and seed.

    None where there is no such run, or for a local run itself. Clients without a value in either are left out. With
    "clients_last" both are compared as they were at the end.
    """
    alone = reference(result, results)
    if alone is None or result["algorithm"] == REFERENCE:
        return None
    main = result["about"]["main"]
    gain = _array(result[clients][main]) - _array(alone[clients][main])
    gain = gain if result["about"]["higher"] else -gain
    known = np.isfinite(gain)
    return float((gain[known] > 0).mean()) if known.any() else None


def reference(result: Result, results: Iterable[Result]) -> Result | None:
    """The local run that a run is held against: the same experiment, seed, clients and amounts of data."""

    def same(told: Result) -> tuple[Any, ...]:
        return tuple(str(told.get(key)) for key in ("experiment", "scale", "seed", "keys", "sizes", "facts", "main"))

    alone = [r for r in results if r["algorithm"] == REFERENCE and same(r["about"]) == same(result["about"])]
    home = _out(result)
    return min(alone, key=lambda r: _out(r) != home, default=None)


def _rows(results: Sequence[Result]) -> list[Row]:
    """One row for an algorithm; where several folders hold it, one for each, with the folder's name."""
    held: dict[tuple[str, Path], list[Result]] = {}
    for result in results:
        held.setdefault((result["algorithm"], _out(result)), []).append(result)
    names = [algorithm for algorithm, _ in held]
    rows = []
    for (algorithm, out), members in held.items():
        main = members[0]["about"]["main"]
        trained = [r["train"][main] for r in members if r.get("train")]
        weights = [each[max(each, key=int)] for r in members if (each := r.get("on_attackers"))]
        better = [share for r in members if (share := better_off(r, results)) is not None]
        rows.append(
            Row(
                algorithm=algorithm,
                name=algorithm if names.count(algorithm) == 1 else f"{algorithm} ({out.name})",
                best=[_number(r["metrics"][main]) for r in members],
                last=[_number(r["last"].get(main)) for r in members],
                spread=_mean([_number(r["metrics"].get(f"{main}_std_clients")) for r in members]),
                worst=_mean([_number(r["metrics"].get("worst_client")) for r in members]),
                better=_mean(better) if better else None,
                sent=_mean([moved(r, "sent") for r in members]),
                broadcast=_mean([moved(r, "broadcast") for r in members]),
                seeds=tuple(r["seed"] for r in members),
                train=_mean(trained) if trained else None,
                targets=[r.get("targets") or {} for r in members],
                on_attackers=_mean(weights) if weights else None,
            )
        )
    return rows


def _gap(row: Row) -> tuple[float | None, float | None]:
    """What a row's models reach on training data, and how much better that is than on those they are judged on."""
    return row.train, None if row.train is None else row.train - row.mean


def moved(result: Result, way: str) -> float:
    """How many numbers a run moved up and down, `sent` or `broadcast`."""
    both = result["ledger"][way]
    return float(both["up"]["numbers"] + both["down"]["numbers"])


def _out(result: Result) -> Path:
    return Path(result["run"]).resolve().parent.parent


def _number(given: Any) -> float:
    return float("nan") if given is None else float(given)


def _array(given: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([_number(each) for each in given])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _over_seeds(metric: str, values: Sequence[float]) -> str:
    text = value(metric, _mean(values))
    if len(values) < 2 or text == NOTHING:
        return text
    scale, sign = unit(metric)
    std = scale * float(np.std(values, ddof=1))
    return f"{text} ± {std:.1f}" if sign else f"{text} ± {std:.2g}"


def _seeds(rows: Sequence[Row]) -> str:
    seeds = sorted({seed for row in rows for seed in row.seeds})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", **{c: "\\" + c for c in "&%$#_{}"}}
    return "".join(special.get(c, c) for c in text)
