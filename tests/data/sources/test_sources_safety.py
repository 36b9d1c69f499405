"""Archives and pickles that mean harm, or are broken: refused as a whole, and never anything but a `DataError`."""

import io
import os
import pickle
import random
import shutil
import tarfile
import zipfile

import numpy as np
import pytest
from published import (
    ar,
    cifar,
    cifar10_binary,
    cifar10_pictures,
    cifar10_python,
    cifar100_python,
    deb,
    mnist,
    packed,
    python2,
    python3,
    shrunk,
    tar,
    zipped,
)

from coterie.data.sources import cifar as cifar_sets
from coterie.data.sources import door, idx, pickles, store, unpack
from coterie.errors import DataError

OUTSIDE = ["../evil", "a/../../evil", "/etc/evil", "..\\evil", "C:\\evil", "C:/evil", "a/.."]


def everything(path):
    return dict(unpack.members(path))


@pytest.mark.parametrize("name", OUTSIDE)
def test_members_outside_are_refused(name, tmp_path):
    members = {"good": b"1", name: b"2"}
    for path in (
        tar(tmp_path / "x.tar.gz", members),
        tar(tmp_path / "x.tar", members, "w"),
        zipped(tmp_path / "x.zip", members),
        zipped(tmp_path / "x.whl", members),
        deb(tmp_path / "x.deb", members),
    ):
        with pytest.raises(DataError, match=r"points outside"):
            everything(path)
        with pytest.raises(DataError, match=r"points outside"):
            list(unpack.members(path, lambda name: name == "good"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("good")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match="link or a device"):
        everything(tmp_path / "x.tar")


def test_links_in_a_zip_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        info = zipfile.ZipInfo("good")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="is a link"):
        everything(tmp_path / "x.zip")


def test_links_in_an_unpacked_folder_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "good").symlink_to(tmp_path / "secret")
    assert dict(unpack.tree(tmp_path / "there")) == {}


@pytest.mark.parametrize("packing", ["xz", "gz"])
def test_good_archives_are_read(packing, tmp_path):
    members = {"./a/b": b"1" * 1000, "c": b""}
    read = {"a/b": b"1" * 1000, "c": b""}
    assert everything(tar(tmp_path / "x.tgz", members)) == read
    assert everything(deb(tmp_path / "x.deb", members, packing)) == read
    assert everything(zipped(tmp_path / "x.zip", {"a/b": b"1" * 1000, "c": b""})) == read


def test_truncated_archives_are_refused(tmp_path):
    members = {"a": os.urandom(5000), "b": os.urandom(5000)}
    for path in (
        tar(tmp_path / "x.tgz", members),
        zipped(tmp_path / "x.zip", members),
        deb(tmp_path / "x.deb", members),
    ):
        content = path.read_bytes()
        for cut in (0, 1, 10, 100, len(content) // 2, len(content) - 5):
            path.write_bytes(content[:cut])
            with pytest.raises(DataError):
                everything(path)


def test_packages_without_data_are_refused(tmp_path):
    with pytest.raises(DataError, match="no data"):
        everything(ar(tmp_path / "x.deb", {"debian-binary": b"2.0\n"}))
    (tmp_path / "x.deb").write_bytes(b"hello")
    with pytest.raises(DataError, match="no Debian package"):
        everything(tmp_path / "x.deb")


def test_a_small_file_that_claims_to_be_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "_LARGEST", 100)
    for path in (tar(tmp_path / "x.tgz", {"a": b"0" * 1000}), zipped(tmp_path / "x.zip", {"a": b"0" * 1000})):
        with pytest.raises(DataError, match="claims 1000 bytes"):
            everything(path)
    with pytest.raises(DataError, match="more than 100 bytes"):
        unpack.gunzip("x", packed({"x": b"0" * 1000})["x.gz"])


class Harm:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_that_mean_harm_are_refused(protocol, tmp_path):
    sign = tmp_path / "sign"
    for harm in (
        Harm(os.system, f"touch {sign}"),
        Harm(eval, f"open({str(sign)!r}, 'w')"),
        Harm(getattr, "x", "__class__"),
        Harm(np.load, str(sign)),
        Harm(pickle.loads, b"N."),
    ):
        with pytest.raises(DataError, match="refused"):
            pickles.loads("x", pickle.dumps({"data": harm}, protocol=protocol))
    assert not sign.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"N",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a byte array of a terabyte
        b"\x80\x05\x8e" + (1 << 40).to_bytes(8, "little") + b".",
        b"Nr\xff\xff\xff\xf0.",  # remember something at place four thousand million
        b"cnumpy\ndtype\n(S'V99999999999'\ntR.",
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(tR(I1\n(L99999999999L\ntcnumpy\ndtype\n(S'u1'\ntRI00\nS''\ntb.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"cnumpy\ncore.multiarray.sys\n.",
        b"(" * 10_000 + b"t" * 10_000 + b".",
        b"I" + b"9" * 100_000 + b"\n.",
    ],
)
def test_pickles_that_ask_for_too_much_get_nothing(content):
    try:
        found = pickles.loads("x", content)
    except DataError:
        return
    assert found is None or isinstance(found, tuple | pickles._Dtype)  # odd, but harmless


def test_arrays_come_out_as_they_went_in():
    told = {
        b"a": np.arange(12, dtype=np.int64).reshape(3, 4),
        b"b": np.zeros((2, 0), np.uint8),
        b"c": [1, -2, 300, "é"],
    }
    for content in (pickle.dumps(told, protocol) for protocol in (0, 1, 2, 3, 4)):
        found = pickles.loads("x", content)
        np.testing.assert_array_equal(found[b"a"], told[b"a"])
        assert found[b"b"].shape == (2, 0)
        assert found[b"c"] == told[b"c"]
    fortran = {"a": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    np.testing.assert_array_equal(pickles.loads("x", pickle.dumps(fortran, 2))["a"], fortran["a"])


def mutated(content, chance):
    """A few bytes changed, moved, repeated, cut out or cut off."""
    content = bytearray(content)
    for _ in range(chance.randint(1, 6)):
        place, other = chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)
        kind = chance.randrange(6)
        if kind == 0 and content:
            content[place % len(content)] = chance.randrange(256)
        elif kind == 1:
            content[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
        elif kind == 2:
            del content[place : place + chance.randint(1, 40)]
        elif kind == 3:
            content[place:place] = content[other : other + chance.randint(1, 60)]
        elif kind == 4 and content:
            content[place % len(content)] ^= 1 << chance.randrange(8)
        elif chance.random() < 0.2:
            del content[place:]
    return bytes(content)


def seeds(tmp_path):
    files = packed(mnist(2, 1)[0])
    few = {name: content[:400] for name, content in files.items()}
    images, labels = cifar()
    tar(tmp_path / "s.tgz", few)
    tar(tmp_path / "s.tar", {"../x": b"y"} | few, "w")
    tar(tmp_path / "t.tar", few, "w")
    zipped(tmp_path / "s.zip", few)
    deb(tmp_path / "s.deb", few, "gz")
    deb(tmp_path / "t.deb", few)
    archives = [(path.suffix, path.read_bytes()) for path in sorted(tmp_path.glob("[st].*"))]
    small = {b"data": np.zeros((2, 6), np.uint8), b"labels": [1, 2], b"name": b"x"}
    batch = next(iter(cifar10_python(images[:, :, :2, :2].repeat(16, 2).repeat(16, 3), labels).values()))
    texts = [python2(small), python3(small), batch[:900], pickle.dumps(Harm(os.system, "touch evil"))]
    return archives, texts + [pickle.dumps(small, protocol) for protocol in (0, 3, 4, 5)]


def fuzzed(count, tmp_path, monkeypatch):
    """Archives and pickles in turn; the count of those refused. Nothing may appear beside the archive itself."""
    archives, texts = seeds(tmp_path)
    inside = tmp_path / "inside" / "deeper"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    before = set(tmp_path.rglob("*"))
    chance, refused = random.Random(1), 0
    for number in range(count):
        suffix, content = archives[number % len(archives)]
        path = inside / f"x{suffix}"
        path.write_bytes(mutated(content, chance))
        try:
            for name, member in unpack.members(path):
                assert not name.startswith("/")
                assert ".." not in name.split("/")
                if name.endswith(".gz"):
                    unpack.gunzip(name, member)
        except DataError:
            refused += 1
        path.unlink()
        try:
            pickles.loads("x", mutated(texts[number % len(texts)], chance))
        except DataError:
            refused += 1
    assert set(tmp_path.rglob("*")) == before
    return refused


def test_fuzz(tmp_path, monkeypatch):
    assert fuzzed(300, tmp_path, monkeypatch) > 300


@pytest.mark.full
def test_fuzz_ten_thousand(tmp_path, monkeypatch):
    assert fuzzed(10_000, tmp_path, monkeypatch) > 10_000


def published(images, labels):
    """Small data sets as files in a folder, and how they are read."""
    ten = shrunk(cifar_sets.CIFAR10, counts=(10, 4))
    return {
        "mnist": (shrunk(idx.MNIST, counts=(12, 6)), packed(mnist()[0])),
        "cifar10, bytes": (ten, cifar10_binary(images, labels)),
        "cifar10, pickles": (ten, cifar10_python(images, labels)),
        "cifar10, pictures": (ten, cifar10_pictures(images, labels)),
        "cifar100": (shrunk(cifar_sets.CIFAR100, counts=(10, 4)), cifar100_python(images, labels, 10)),
    }


@pytest.mark.parametrize("name", published(*cifar()))
@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.full)])
def test_a_data_set_with_a_mutated_file_is_there_whole_or_not_at_all(name, count, home, tmp_path):
    spec, files = published(*cifar())[name]
    for path, content in files.items():
        (tmp_path / "mine" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / path).write_bytes(content)
    chance = random.Random(2)
    for _ in range(count):
        path = chance.choice(sorted(files))
        (tmp_path / "mine" / path).write_bytes(mutated(files[path], chance))
        try:
            place = door.obtain(spec, "files", tmp_path / "mine")
            store.verify(spec.name)
            shutil.rmtree(place)
        except DataError:
            pass
        assert [left.name for left in home.iterdir()] == [".locks"]
        (tmp_path / "mine" / path).write_bytes(files[path])


def test_pictures_that_are_none_are_refused():
    from coterie.data.sources import images

    for content in (b"", b"\x89PNG\r\n\x1a\n", b"GIF89a" + b"\0" * 40, io.BytesIO(b"x" * 99).read()):
        with pytest.raises(DataError, match="no picture"):
            images.picture("x.png", content)
