"""Reads the members of archives without ever writing one of them to disk.

Every member is looked at first: an archive with an absolute name, a `..`, a link or a device in it is refused whole,
even where the member is not wanted. Whatever is wrong with an archive ends as a `DataError`.
"""

import gzip
import io
import lzma
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from coterie.errors import DataError

Wanted = Callable[[str], bool]
_LARGEST = 4 << 30  # bytes of one member; no data set here holds a larger one
_LINK = 0o120000
_KIND = 0o170000
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    RuntimeError,
    MemoryError,
)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except _BROKEN as problem:
        raise DataError(f"{path.name} is damaged or no archive of its kind: {problem}") from problem


def safe(archive: str, name: str) -> str:
    """The name of a member, if it can only mean a place inside; refuses it otherwise."""
    plain = name.replace("\\", "/")
    parts = PurePosixPath(plain).parts
    if not plain or plain.startswith("/") or ".." in parts or "\0" in plain or (parts and parts[0].endswith(":")):
        raise DataError(f"{archive}: the member {name!r} points outside the archive; the archive is refused")
    return str(PurePosixPath(plain))


def _all(archive: str, file: IO[bytes], size: int) -> bytes:
    if not 0 <= size <= _LARGEST:
        raise DataError(f"{archive}: a member claims {size} bytes; the archive is refused")
    content = file.read(size + 1)
    if len(content) != size:
        raise DataError(f"{archive}: a member has {len(content)} bytes but claims {size}; the archive is truncated")
    return content


def _tar(path: Path, archive: tarfile.TarFile, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name = safe(path.name, member.name)
        if not (member.isreg() or member.isdir()):
            raise DataError(f"{path.name}: the member {member.name!r} is a link or a device; the archive is refused")
        if member.isreg() and wanted(name):
            file = archive.extractfile(member)
            assert file is not None
            yield name, _all(path.name, file, member.size)
    rest = archive.fileobj
    while rest is not None and rest.read(1 << 20):  # to the very end, where the packing has its own checksum
        pass


def _zip(path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        for member in members:
            safe(path.name, member.filename)
            if (member.external_attr >> 16) & _KIND == _LINK:
                raise DataError(f"{path.name}: the member {member.filename!r} is a link; the archive is refused")
        for member in sorted(members, key=lambda member: PurePosixPath(member.filename)):  # as `tree` has them
            name = safe(path.name, member.filename)
            if not member.is_dir() and wanted(name):
                with archive.open(member) as file:
                    yield name, _all(path.name, file, member.file_size)


def _deb(path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """A Debian package is an `ar` archive: an 8-byte sign, then members with a 60-byte head, padded to even sizes."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise DataError(f"{path.name} is no Debian package")
        while head := file.read(60):
            if len(head) != 60 or head[58:] != b"`\n":
                raise DataError(f"{path.name}: a member's head is damaged; the package is truncated or altered")
            name, size = head[:16].decode("latin-1").strip().rstrip("/"), int(head[48:58])
            if name.startswith("data.tar"):
                break
            if size < 0:
                raise DataError(f"{path.name}: a member claims {size} bytes; the package is refused")
            file.seek(size + size % 2, io.SEEK_CUR)
        else:
            raise DataError(f"{path.name}: the package has no data in it")
        if not name.endswith(".zst"):
            with tarfile.open(fileobj=io.BytesIO(_all(path.name, file, size)), mode="r:*") as archive:
                yield from _tar(path, archive, wanted)
            return
    if shutil.which("dpkg-deb") is None:
        raise DataError(f"{path.name} is packed with zstd: reading it takes the program dpkg-deb")
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True)
    if done.returncode:
        raise DataError(f"{path.name} is damaged: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        yield from _tar(path, archive, wanted)


def members(path: Path, wanted: Wanted = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted members of a .tar, .tgz or .deb in its order, of a .zip or .whl by name."""
    with _reading(path):
        if path.suffix in (".zip", ".whl"):
            yield from _zip(path, wanted)
        elif path.suffix == ".deb":
            yield from _deb(path, wanted)
        else:
            with tarfile.open(path) as archive:
                yield from _tar(path, archive, wanted)


def tree(folder: Path, wanted: Wanted = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """The same for a folder into which somebody has unpacked an archive; links are not followed."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and wanted(name):
            yield name, path.read_bytes()


def contents(folder: Path, archive: str, wanted: Wanted = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """The wanted members of the archive whose name matches, or of the folder where it was unpacked."""
    if places := sorted(folder.glob(archive)):
        return members(places[-1], wanted)
    return tree(folder, wanted)


def chosen(title: str, folder: Path, archive: str, names: Collection[str], wanted: Wanted) -> dict[str, bytes]:
    """The files of these names among the contents that are wanted; all must be there."""
    found = {PurePosixPath(path).name: content for path, content in contents(folder, archive, wanted)}
    for name in names:
        if name not in found:
            raise DataError(f"{title}: {name} is missing; it belongs in {folder}")
    return {name: found[name] for name in names}


def gunzip(name: str, content: bytes) -> bytes:
    """What a .gz holds; what is not packed stays as it is."""
    if content[:2] != b"\x1f\x8b":
        return content
    with _reading(Path(name)), gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        unpacked = file.read(_LARGEST + 1)
        if len(unpacked) > _LARGEST:
            raise DataError(f"{name} unpacks to more than {_LARGEST} bytes; it is refused")
        return unpacked
