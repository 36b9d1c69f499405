"""What all image data sets share: how their arrays lie on disk, what is said of them, how they are opened."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.sources import store
from coterie.data.sources.progress import Progress
from coterie.data.sources.store import Writer
from coterie.errors import DataError

Batch = tuple[NDArray[Any], NDArray[Any]]


def write(
    out: Writer,
    progress: Progress,
    title: str,
    batches: Iterable[Batch],
    counts: tuple[int, int],
    shape: tuple[int, ...],
    classes: tuple[str, ...],
) -> dict[str, Any]:
    """Write images (uint8, N × C × H × W) and labels, the publisher's training samples first; what is to be known.

    The channel means and deviations are those of the training samples, exact: from counts of the 256 grey levels.
    """
    train, total = counts[0], sum(counts)
    levels = np.zeros((shape[0], 256), dtype=np.int64)
    labels, seen = np.empty(total, dtype=np.int64), 0
    with out.rows("inputs", np.uint8, (total, *shape)) as append, progress.bar(title, total, unit="images") as advance:
        for images, targets in batches:
            if images.dtype != np.uint8 or len(images) != len(targets) or seen + len(images) > total:
                raise DataError(f"{title}: {seen + len(images)} images and {seen + len(targets)} labels of {total}")
            append(images)
            for channel in range(shape[0]):
                counted = images[: max(train - seen, 0), channel]
                levels[channel] += np.bincount(counted.ravel(), minlength=256)
            labels[seen : seen + len(targets)] = targets
            seen += len(images)
            advance(len(images))
    if seen == total and not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(f"{title}: labels from {labels.min()} to {labels.max()}, but there are {len(classes)} classes")
    out.array("targets", labels)
    pixels, scale = levels.sum(1), np.arange(256) / 255
    mean = levels @ scale / pixels
    std = np.sqrt(levels @ scale**2 / pixels - mean**2)
    return {"train": train, "classes": list(classes), "mean": mean.tolist(), "std": std.tolist()}


def read(folder: Path, facts: dict[str, Any]) -> Dataset:
    """An installed image data set, mapped into memory."""
    return Dataset(
        name=folder.name,
        inputs=store.array(folder, "inputs"),
        targets=store.array(folder, "targets"),
        train=facts["train"],
        classes=tuple(facts["classes"]),
        facts={key: value for key, value in facts.items() if key not in ("train", "classes")},
    )


def picture(name: str, content: bytes) -> NDArray[np.uint8]:
    """A decoded picture, H × W × 3."""
    import io
    import warnings

    try:
        from PIL import Image
    except ImportError as problem:
        raise DataError("reading pictures takes pillow: pip install 'coterie[data]'") from problem
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a batch is one tall picture
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
                return np.asarray(image.convert("RGB"))
    except Exception as problem:  # a damaged picture can fail in any way, and every way means the same
        raise DataError(f"{name} is no picture that can be read: {problem}") from problem
