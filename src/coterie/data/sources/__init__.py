"""The one door to real data: `get` fetches a data set, `load` opens it, `listing` says what there is."""

from coterie.data.sources.door import Entry, find, get, listing, load
from coterie.data.sources.store import root, verify

__all__ = ["Entry", "find", "get", "listing", "load", "root", "verify"]
