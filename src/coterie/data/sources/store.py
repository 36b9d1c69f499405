"""The folder of installed data sets: either a whole one is there, or nothing of it.

A data set is written into a folder of its own beside the others, flushed to disk and renamed into place in one step;
a lock per data set keeps two processes apart; `manifest.json` inside says where it came from and what it must hold.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray

from coterie.errors import DataError

MANIFEST = "manifest.json"
FORMAT = 1


def root() -> Path:
    """`$COTERIE_DATA`, or a place in the user's cache folder."""
    if told := os.environ.get("COTERIE_DATA"):
        return Path(told).expanduser()
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "coterie" / "data"


def digest(path: Path, kind: str = "sha256") -> str:
    """The checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def check(path: Path, expected: str) -> str:
    """Refuse a file whose checksum is not the expected one; the file's SHA-256."""
    kind, _, value = expected.rpartition(":")
    found = digest(path, kind or "sha256")
    if value and found != value:
        label = "MD5" if kind == "md5" else "SHA-256"
        raise DataError(f"{path.name}: its {label} is {found} but must be {value}; the file is damaged or altered")
    return found if kind in ("", "sha256") else digest(path)


def explain(problem: OSError, what: str) -> DataError:
    """The error that a user should see for a problem of the disk."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(f"{what}: no space is left on the disk of {root()}; free some, or set COTERIE_DATA elsewhere")
    return DataError(f"{what}: {problem}")


def manifest(name: str) -> dict[str, Any] | None:
    """What the manifest of an installed data set says; None if it is not there whole."""
    folder = root() / name
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = told["format"] == FORMAT and all(
            (folder / part).stat().st_size == facts["size"] for part, facts in told["parts"].items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return told if whole else None


def verify(name: str) -> None:
    """Read every file of an installed data set again and compare its checksum with the manifest's."""
    told = manifest(name)
    if told is None:
        raise DataError(f"data set {name} is not whole in {root() / name}; fetch it again: coterie data get {name}")
    for part, facts in told["parts"].items():
        check(root() / name / part, facts["sha256"])


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time for one data set."""
    locks = root() / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{name}.lock")
        lock.acquire()
    except OSError as problem:
        raise explain(problem, f"data set {name} cannot be installed") from problem
    try:
        yield
    finally:
        lock.release()


class Writer:
    """Writes the parts of one data set, in order and through plain writes.

    Never through a memory map: on a full disk that would kill the process instead of raising.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """An open file of the data set, flushed to disk when it closes."""
        with (self.folder / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def text(self, name: str, content: str) -> None:
        """A text file."""
        with self.file(name) as file:
            file.write(content.encode())

    def array(self, name: str, values: NDArray[Any]) -> None:
        """A whole array at once."""
        with self.rows(name, values.dtype, values.shape) as append:
            append(values)

    @contextmanager
    def rows(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[Any]:
        """A function that appends rows to an array whose shape is known beforehand."""
        kind = np.dtype(dtype)
        written = 0
        with self.file(f"{name}.npy") as file:
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)

            def append(values: NDArray[Any]) -> None:
                nonlocal written
                if values.shape[1:] != shape[1:]:
                    raise DataError(f"{name}: rows of shape {values.shape[1:]}, but {shape[1:]} is expected")
                written += len(values)
                file.write(np.ascontiguousarray(values, dtype=kind).data)

            yield append
        if written != shape[0]:
            raise DataError(f"{name}: {written} rows, but {shape[0]} are expected")


def array(folder: Path, name: str) -> NDArray[Any]:
    """A part of an installed data set, mapped into memory."""
    path = folder / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as problem:
        raise DataError(
            f"{path} cannot be read ({problem}); fetch it again: coterie data get {folder.name}"
        ) from problem


def _flush(folder: Path) -> None:
    with suppress(OSError):  # not every system lets a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(name: str) -> None:
    """Drop what a killed process left; call it under the lock only."""
    for left in root().glob(f".new-{name}.*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def installing(name: str, facts: dict[str, Any]) -> Iterator[Writer]:
    """Write a data set; it appears whole when the block ends well, and not at all otherwise.

    `facts` may be filled inside the block; it goes into the manifest.
    """
    base = root()
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".new-{name}.", dir=base))
    except OSError as problem:
        raise explain(problem, f"data set {name} cannot be installed") from problem
    try:
        yield Writer(folder)
        parts = {
            str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        told = {"format": FORMAT, "name": name, "parts": parts, **facts}
        Writer(folder).text(MANIFEST, json.dumps(told, indent=1, sort_keys=True))
        _flush(folder)
        folder.chmod(0o755)
        place = base / name
        if place.exists():  # not whole, else nobody would install it again
            shutil.rmtree(place)
        folder.rename(place)
        _flush(base)
    except OSError as problem:
        raise explain(problem, f"data set {name} cannot be installed") from problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)
