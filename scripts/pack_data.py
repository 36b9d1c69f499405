#!/usr/bin/env python3
"""Carry an installed data set to a machine without a network, in parts of a limited size.

    python scripts/pack_data.py pack cifar10 --out parts --mb 46     # here: parts/cifar10-00, parts/cifar10-01, …
    python scripts/pack_data.py join parts/cifar10-*                 # there: makes $COTERIE_DATA/cifar10

Each part is a folder of its own with the same index in it, so that parts may travel one by one and in any order; what
arrives is checked against the index, and the data set appears whole or not at all. Bytes are stored as differences
from their left neighbour (of images, that is what compresses) under LZMA. Needs Python's library and numpy only.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

INDEX = "index.json"
BLOCK = 1 << 22


def root(told: str | None) -> Path:
    """Where data sets live: as told, else `$COTERIE_DATA`, else the user's cache folder as `coterie` has it."""
    if told or os.environ.get("COTERIE_DATA"):
        return Path(told or os.environ["COTERIE_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coterie" / "data"


def sha(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def row(path: Path) -> int:
    """How long the rows are along which differences are taken; 0 for files in which they would not help."""
    if path.suffix != ".npy":
        return 0
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return int(array.shape[-1]) if array.dtype == np.uint8 and array.ndim > 1 else 0


def head(path: Path, width: int) -> int:
    """The bytes before the first row, which are kept as they are."""
    return path.stat().st_size % width if width else 0


def blocks(file: IO[bytes], width: int) -> Iterator[np.ndarray]:
    """The rest of a file, as whole rows of bytes."""
    while block := file.read(BLOCK // max(width, 1) * max(width, 1)):
        yield np.frombuffer(block, dtype=np.uint8).reshape(-1, width or len(block))


class Split(io.RawIOBase):
    """Writes one stream into part after part."""

    def __init__(self, out: Path, name: str, size: int) -> None:
        self.out, self.name, self.size, self.parts, self.file = out, name, size, [], None

    def write(self, data: bytes) -> int:
        """Append, opening the next part where one is full."""
        view = memoryview(data)
        while view:
            if self.file is None or self.file.tell() == self.size:
                self.end()
                folder = self.out / f"{self.name}-{len(self.parts):02d}"
                folder.mkdir(parents=True)
                self.parts.append(folder / "part.xz")
                self.file = self.parts[-1].open("wb")
            taken = view[: self.size - self.file.tell()]
            self.file.write(taken)
            view = view[len(taken) :]
        return len(data)

    def end(self) -> None:
        """Close the part that is being written."""
        if self.file:
            self.file.close()


def pack(name: str, source: Path, out: Path, size: int) -> list[Path]:
    """Cut one data set into parts of at most `size` bytes, the index included."""
    if not (source / "manifest.json").is_file():
        here = ", ".join(sorted(path.parent.name for path in source.parent.glob("*/manifest.json"))) or "nothing"
        sys.exit(f"data set {name} is not in {source.parent}, only {here}; fetch it first: coterie data get {name}")
    if old := sorted(out.glob(f"{name}-[0-9][0-9]")):
        sys.exit(f"{old[0]} is there already; remove it, or give another --out")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    told = [
        {
            "name": path.relative_to(source).as_posix(),
            "size": path.stat().st_size,
            "sha256": sha(path),
            "row": row(path),
        }
        for path in files
    ]
    split = Split(out, name, size - 65536)
    packer = lzma.LZMACompressor(preset=4)
    try:
        for path, facts in zip(files, told, strict=True):
            with path.open("rb") as file:
                split.write(packer.compress(file.read(head(path, facts["row"]))))
                for block in blocks(file, facts["row"]):
                    if facts["row"]:
                        block = np.diff(block, axis=1, prepend=np.uint8(0))
                    split.write(packer.compress(block.tobytes()))
        split.write(packer.flush())
        split.end()
        parts = [{"size": part.stat().st_size, "sha256": sha(part)} for part in split.parts]
        for number, part in enumerate(split.parts):
            index = {"data": name, "part": number, "parts": parts, "files": told}
            (part.parent / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except BaseException:
        for part in split.parts:
            shutil.rmtree(part.parent, ignore_errors=True)
        raise
    return [part.parent for part in split.parts]


class Joined(io.RawIOBase):
    """Reads the parts as one stream."""

    def __init__(self, parts: list[Path]) -> None:
        self.left, self.file = list(parts), None

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """The next bytes, from whichever part has them."""
        while True:
            if self.file and (count := self.file.readinto(buffer)):
                return count
            if self.file:
                self.file.close()
            if not self.left:
                return 0
            self.file = self.left.pop(0).open("rb")


def join(folders: list[Path], base: Path) -> Path:
    """Put the parts together again, as a data set that is ready to open."""
    found = {}
    for folder in folders:
        if not (folder / INDEX).is_file():
            sys.exit(f"{folder} is no part: there is no {INDEX} in it")
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            found[index.pop("part")] = (folder / "part.xz", index)
        except (ValueError, KeyError, AttributeError):
            sys.exit(f"{folder / INDEX} is damaged; bring this part again")
    index = next(iter(found.values()))[1]
    if any(other != index for _, other in found.values()):
        sys.exit("these parts are not of one and the same data set")
    missing = [number for number in range(len(index["parts"])) if number not in found]
    if missing:
        sys.exit(f"of {len(index['parts'])} parts of {index['data']}, these are missing: {missing}")
    name, parts = index["data"], [found[number][0] for number in range(len(index["parts"]))]
    for part, facts in zip(parts, index["parts"], strict=True):
        if sha(part) != facts["sha256"]:
            sys.exit(f"{part}: its SHA-256 is {sha(part)} but must be {facts['sha256']}")
    if Path(name).name != name or any(
        ".." in Path(f["name"]).parts or Path(f["name"]).is_absolute() for f in index["files"]
    ):
        sys.exit("the index names a place outside the data set; it is refused")
    base.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".new-{name}.", dir=base))
    try:
        with lzma.open(io.BufferedReader(Joined(parts), BLOCK)) as stream:
            for facts in index["files"]:
                place, width, left = new / facts["name"], facts["row"], facts["size"]
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    first = left % width if width else 0
                    file.write(stream.read(first))
                    left -= first
                    while left:
                        block = stream.read(min(left, BLOCK // max(width, 1) * max(width, 1)))
                        if not block:
                            sys.exit(f"the parts end inside {facts['name']}")
                        left -= len(block)
                        if width:
                            rows = np.frombuffer(block, dtype=np.uint8).reshape(-1, width)
                            block = np.cumsum(rows, axis=1, dtype=np.uint8).tobytes()
                        file.write(block)
                if sha(place) != facts["sha256"]:
                    sys.exit(f"{facts['name']}: its SHA-256 is {sha(place)} but must be {facts['sha256']}")
        new.chmod(0o755)
        shutil.rmtree(base / name, ignore_errors=True)
        new.rename(base / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return base / name


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where data sets live, instead of $COTERIE_DATA")
    does = parser.add_subparsers(dest="do", required=True)
    packs = does.add_parser("pack", help="cut an installed data set into parts")
    packs.add_argument("name")
    packs.add_argument("--out", type=Path, required=True, help="the folder for the parts")
    packs.add_argument("--mb", type=float, default=46, help="the most millions of bytes in a part")
    joins = does.add_parser("join", help="make the data set from its parts")
    joins.add_argument("folders", type=Path, nargs="+", help="the parts' folders, in any order")
    told = parser.parse_args()
    if told.do == "join":
        print(join(told.folders, root(told.root)))
    elif told.mb < 0.1:
        sys.exit("--mb must be at least 0.1")
    else:
        for folder in pack(told.name, root(told.root) / told.name, told.out, int(told.mb * 1e6)):
            print(folder)


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(str(problem))
