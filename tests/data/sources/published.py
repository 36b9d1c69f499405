"""Small data sets written the way their publishers write them, for the loaders to read."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from coterie.data.sources.spec import Spec


def shrunk(spec: Spec, **told: Any) -> Spec:
    """The same data set with other counts, and without the checksums of the real files."""
    forms = tuple(
        replace(
            form,
            decode=partial(form.decode, **told),
            files=tuple(replace(raw, digest="") for raw in form.files),
        )
        for form in spec.forms
    )
    return replace(spec, forms=forms)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def tar(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def deb(path: Path, members: dict[str, bytes], packing: str = "xz") -> Path:
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode=f"w:{packing}") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return ar(path, {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", f"data.tar.{packing}": inner.getvalue()})


def ar(path: Path, members: dict[str, bytes]) -> Path:
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in members.items():
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def mnist(train: int = 12, test: int = 6) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The four files, and what must be read from them."""
    images, labels = random(train + test, 28, 28), random(train + test, seed=1) % 10
    files = {
        "train-images-idx3-ubyte": idx(images[:train]),
        "train-labels-idx1-ubyte": idx(labels[:train]),
        "t10k-images-idx3-ubyte": idx(images[train:]),
        "t10k-labels-idx1-ubyte": idx(labels[train:]),
    }
    return files, images[:, None], labels


def packed(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


def cifar(train: int = 10, test: int = 4, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    return random(train + test, 3, 32, 32), (random(train + test, seed=1) % classes).astype(np.int64)


def cifar10_binary(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    """Five batches of two and one of the rest: records of a label byte and 3072 bytes."""
    records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], 1)
    cuts = {f"cifar-10-batches-bin/data_batch_{n + 1}.bin": records[2 * n : 2 * n + 2].tobytes() for n in range(5)}
    return {**cuts, "cifar-10-batches-bin/test_batch.bin": records[10:].tobytes(), "cifar-10-batches-bin/readme": b""}


def python2(value: Any) -> bytes:
    """A pickle as Python 2 wrote it, operation by operation: protocol 2, text as byte strings, numpy's old names."""

    def text(content: bytes) -> bytes:
        return (
            b"U" + bytes([len(content)]) + content
            if len(content) < 256
            else b"T" + struct.pack("<I", len(content)) + content
        )

    def number(n: int) -> bytes:
        return b"K" + bytes([n]) if 0 <= n < 256 else b"J" + struct.pack("<i", n)

    def write(item: Any) -> bytes:
        if isinstance(item, bytes | str):
            return text(item if isinstance(item, bytes) else item.encode())
        if isinstance(item, int):
            return number(item)
        if isinstance(item, list):
            return b"](" + b"".join(map(write, item)) + b"e"
        if isinstance(item, dict):
            return b"}(" + b"".join(write(key) + write(content) for key, content in item.items()) + b"u"
        assert isinstance(item, np.ndarray)
        kind = b"cnumpy\ndtype\n" + text(item.dtype.str[1:].encode()) + b"K\0K\1\x87R"
        kind += b"(K\3" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\0tb"
        shape = b"(" + b"".join(map(number, item.shape)) + b"t"
        state = b"(K\1" + shape + kind + b"\x89" + text(item.tobytes()) + b"t"
        return b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R" + state + b"b"

    return b"\x80\2" + write(value) + b"."


def python3(value: Any) -> bytes:
    """A pickle as an older numpy under Python 3 wrote it."""
    return pickle.dumps(value, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar10_python(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    def batch(part: slice) -> bytes:
        rows = images[part].reshape(-1, 3072)
        told = {b"data": rows, b"labels": labels[part].tolist(), b"batch_label": b"x", b"filenames": [b"a.png"]}
        return python2(told)

    cuts = {f"cifar-10-batches-py/data_batch_{n + 1}": batch(slice(2 * n, 2 * n + 2)) for n in range(5)}
    return {**cuts, "cifar-10-batches-py/test_batch": batch(slice(10, None)), "cifar-10-batches-py/readme.html": b""}


def cifar10_pictures(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    def batch(part: slice) -> bytes:
        file = io.BytesIO()
        Image.fromarray(images[part].transpose(0, 2, 3, 1).reshape(-1, 1024, 3)).save(file, "PNG")
        return file.getvalue()

    cuts = {f"package/data_batch_{n + 1}.png": batch(slice(2 * n, 2 * n + 2)) for n in range(5)}
    return {
        **cuts,
        "package/test_batch.png": batch(slice(10, None)),
        "package/train_lables.json": json.dumps(labels[:10].tolist()).encode(),
        "package/test_lables.json": json.dumps(labels[10:].tolist()).encode(),
    }


def cifar100_binary(images: np.ndarray, labels: np.ndarray, train: int) -> dict[str, bytes]:
    """Records of a coarse label, a fine label and 3072 bytes."""
    both = np.stack([labels // 5, labels], 1).astype(np.uint8)
    records = np.concatenate([both, images.reshape(len(images), -1)], 1)
    return {
        "cifar-100-binary/train.bin": records[:train].tobytes(),
        "cifar-100-binary/test.bin": records[train:].tobytes(),
    }


def cifar100_python(images: np.ndarray, labels: np.ndarray, train: int) -> dict[str, bytes]:
    def part(rows: slice) -> bytes:
        told = {b"data": images[rows].reshape(-1, 3072), b"fine_labels": labels[rows].tolist()}
        return python2({**told, b"coarse_labels": (labels[rows] // 5).tolist()})

    return {
        "cifar-100-python/train": part(slice(train)),
        "cifar-100-python/test": part(slice(train, None)),
        "cifar-100-python/meta": python2({b"fine_label_names": [b"apple"]}),
    }


def jpeg(side: int, seed: int) -> bytes:
    """A smooth picture, so that JPEG keeps it nearly as it is."""
    ramp = np.add.outer(np.arange(side), np.arange(side))[:, :, None] * np.array([1, 2, 1]) + 13 * seed
    file = io.BytesIO()
    Image.fromarray((ramp % 200).astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)
