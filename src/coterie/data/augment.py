"""Random views of images, whole batches at once and on their device: crop, flip, colour jitter, normalise.

What happens to a sample depends on the sample's key alone, never on its place in the batch, on how the batch was cut
or on the device; without keys nothing random happens, which is evaluation. There is no host work and no loop over
samples, so the whole compiles into one graph and can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import draws
from coterie.errors import DataError, SettingError

# one counter for each thing that is drawn from a sample's key
_DOWN, _RIGHT, _FLIP, _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(7)
_LUMA = (0.299, 0.587, 0.114)
# red, green, blue to brightness and two colour axes (YIQ), in which a change of hue is a rotation; and back
_TO_AXES = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
_FROM_AXES = ((1.0, 0.956, 0.619), (1.0, -0.272, -0.647), (1.0, -1.106, 1.703))


@dataclass(frozen=True)
class Augment:
    """How the images of a batch are varied; the order is crop, flip, jitter, normalise."""

    crop: int = 0  # pixels added on every side before cropping back to the image's size
    fill: str | float = "reflect"  # what is added: the image mirrored at its edge, or a constant in [0, 1]
    flip: bool = False  # left and right exchanged, one time in two
    mean: Sequence[float] = ()  # of each channel, in [0, 1]; empty: not normalised
    std: Sequence[float] = ()
    jitter: float | Sequence[float] = ()  # brightness, contrast, saturation (each a share), hue (of a turn); one: all 3

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        jitter = self.jitter
        if isinstance(jitter, int | float):
            jitter = (jitter,) * 3 if jitter else ()
        shares = (*(float(share) for share in jitter), 0.0, 0.0, 0.0, 0.0)[:4] if len(jitter) <= 4 else ()
        if not shares or min(shares) < 0 or max(shares[:3]) > 1 or shares[3] > 0.5:
            raise SettingError(f"jitter must be up to three shares in [0, 1] and a hue in [0, 0.5], not {self.jitter}")
        object.__setattr__(self, "jitter", shares if any(shares) else ())
        if self.crop < 0:
            raise SettingError(f"crop must be a number of pixels, not {self.crop}")
        if isinstance(self.fill, str) and self.fill != "reflect":
            raise SettingError(f"fill must be 'reflect' or a number in [0, 1], not {self.fill!r}")
        if not isinstance(self.fill, str) and not 0 <= self.fill <= 1:
            raise SettingError(f"fill must be 'reflect' or a number in [0, 1], not {self.fill}")
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise SettingError(f"mean and std need one number per channel, std above 0; not {self.mean} and {self.std}")

    def __call__(self, x: Tensor, keys: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images in [0, 1] before normalising, of `dtype`, from bytes or from floats in [0, 1].

        `x` is (batch dimensions …, C, H, W); `keys` int64 of the batch dimensions, or None for evaluation.
        """
        self._check(x, keys)
        batch, (channels, height, width) = x.shape[:-3], x.shape[-3:]
        x = x.reshape(-1, channels, height, width)
        if keys is not None:
            keys = keys.reshape(-1)
            if self.crop or self.flip:
                x = self._moved(x, keys, dtype)
        x = _floats(x, dtype)
        if keys is not None and self.jitter:
            x = self._jittered(x, keys)
        if self.mean:
            scaled = [(x[:, c] - self.mean[c]) * (1 / self.std[c]) for c in range(channels)]
            x = torch.stack(scaled, dim=1)
        return x.reshape(*batch, channels, height, width)

    def _check(self, x: Tensor, keys: Tensor | None) -> None:
        if x.dim() < 3 or (x.dtype != torch.uint8 and not x.dtype.is_floating_point):
            raise DataError(f"images must be bytes or floats of shape (…, C, H, W), not {x.dtype} of {tuple(x.shape)}")
        channels, height, width = x.shape[-3:]
        if self.mean and len(self.mean) != channels:
            raise DataError(f"mean and std are given for {len(self.mean)} channels, but the images have {channels}")
        if keys is None:
            return
        if keys.dtype != torch.int64 or keys.shape != x.shape[:-3]:
            raise DataError(
                f"keys must be int64 of shape {tuple(x.shape[:-3])}, not {keys.dtype} of {tuple(keys.shape)}"
            )
        if self.crop and self.fill == "reflect" and self.crop >= min(height, width):
            raise DataError(f"a crop of {self.crop} cannot mirror images of {height}×{width}")
        if any(self.jitter[2:]) and channels != 3:  # type: ignore[index]  # a tuple since __post_init__
            raise DataError(f"jitter of saturation and hue needs 3 channels, but the images have {channels}")

    def _moved(self, x: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Crop and flip as one look-up: which row and which column each pixel comes from."""
        count, channels, height, width = x.shape
        rows = torch.arange(height, device=x.device).expand(count, height)
        columns = torch.arange(width, device=x.device).expand(count, width)
        if self.flip:
            flipped = draws.unit(draws.fold(keys, _FLIP), torch.float32) < 0.5
            columns = torch.where(flipped[:, None], width - 1 - columns, columns)
        outside = None
        if self.crop:
            rows = rows + _shift(draws.fold(keys, _DOWN), self.crop)[:, None]
            columns = columns + _shift(draws.fold(keys, _RIGHT), self.crop)[:, None]
            if isinstance(self.fill, str):
                rows, columns = _mirrored(rows, height), _mirrored(columns, width)
            else:
                above, beside = (rows < 0) | (rows >= height), (columns < 0) | (columns >= width)
                outside = (above[:, :, None] | beside[:, None, :])[:, None]
                rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        samples = torch.arange(count, device=x.device)[:, None, None, None]
        planes = torch.arange(channels, device=x.device)[:, None, None]
        x = x[samples, planes, rows[:, None, :, None], columns[:, None, None, :]]
        if outside is None:
            return x
        assert not isinstance(self.fill, str)
        return torch.where(outside, self.fill, _floats(x, dtype))

    def _jittered(self, x: Tensor, keys: Tensor) -> Tensor:
        """Brightness scales; contrast goes away from the mean grey; saturation from each pixel's grey; hue rotates."""
        brightness, contrast, saturation, hue = self.jitter  # type: ignore[misc]
        if brightness:
            x = (x * _around_one(keys, _BRIGHTNESS, brightness, x.dtype)).clamp(0, 1)
        if contrast:
            grey = _grey(x).mean((1, 2, 3), keepdim=True)
            x = (grey + (x - grey) * _around_one(keys, _CONTRAST, contrast, x.dtype)).clamp(0, 1)
        if saturation:
            grey = _grey(x)
            x = (grey + (x - grey) * _around_one(keys, _SATURATION, saturation, x.dtype)).clamp(0, 1)
        if hue:
            turn = (draws.unit(draws.fold(keys, _HUE), torch.float32) * 2 - 1).to(x.dtype) * (2 * torch.pi * hue)
            cos, sin = torch.cos(turn)[:, None, None], torch.sin(turn)[:, None, None]
            y, i, q = (sum(w * x[:, c] for c, w in enumerate(axis)) for axis in _TO_AXES)
            i, q = cos * i - sin * q, sin * i + cos * q
            x = torch.stack([a * y + b * i + c * q for a, b, c in _FROM_AXES], dim=1).clamp(0, 1)
        return x


def _floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) * (1 / 255) if x.dtype == torch.uint8 else x.to(dtype)


def _shift(keys: Tensor, most: int) -> Tensor:
    """A whole number in [-most, most] from each key; 24 random bits are enough, and exact on every device."""
    return (draws.unit(keys, torch.float32) * (2 * most + 1)).long() - most


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Places beyond an edge reflected at it, the edge itself not repeated."""
    return (size - 1) - ((size - 1) - places.abs()).abs()


def _around_one(keys: Tensor, counter: int, share: float, dtype: torch.dtype) -> Tensor:
    factor = 1 + (draws.unit(draws.fold(keys, counter), torch.float32) * 2 - 1) * share
    return factor.to(dtype)[:, None, None, None]


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.unbind(1)
    return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue)[:, None]
