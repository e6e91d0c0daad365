"""The pixel normalisation that pretrained weights expect, read from the file beside them.

timm writes `config.json`, transformers `preprocessor_config.json`, and `bam export` `model.json`.
`crop_pct` is not read, because `bam data import` already cuts out the middle of an image.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bam import files
from bam.errors import InputError
from bam.files import JsonObject

BESIDE = ("preprocessor_config.json", "config.json", "model.json")
# Pillow's names of methods of resizing, in the order of its numbers, which transformers writes.
RESIZING = ("nearest", "lanczos", "bilinear", "bicubic")
LARGEST, LARGEST_SIDE = 2.0**31, 4096


class Normalisation(NamedTuple):
    """The map from pixels x in [0, 1] to a network's inputs, `(x - mean) / std`.

    Attributes:
      mean, std: one number for each channel.
      size: height and width of the images that the weights were trained on; None if unknown.
      interpolation: the method of `RESIZING` that resized these images; "" if unknown.
      source: the file that says so, or "".
      given: names of the fields that the config sets in its place.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    interpolation: str = ""
    source: str = ""
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns all fields and their sources in one line."""
        each = (x if len({*x}) > 1 else x[:1] for x in (self.mean, self.std))
        mean, std = (", ".join(f"{number:.6g}" for number in x) for x in each)
        size = f"{self.size[0]} × {self.size[1]}" if self.size else ""
        values = filter(None, (f"mean {mean}", f"std {std}", size, self.interpolation))
        by = [f"{', '.join(self.given)} as given"] if self.given else []
        if self.source or not {"mean", "std"} <= {*self.given}:
            by += [self.source or "no file beside the weights says what they expect"]
        return f"{'; '.join(values)} ({'; '.join(by)})"


def expected_by(
    weights: Path, options: Mapping[str, Any], prefix: str, default: Normalisation
) -> Normalisation:
    """Returns the normalisation that weights expect, by options, the file beside them or `default`.

    Args:
      weights: the file of weights. The first file of `BESIDE` in its folder that has a
        normalisation is read.
      options: `mean` and `std` (one number for all channels, or one each; three are averaged for
        grey images) and `size` (pixels); None for a value from the file.
      prefix: the beginning of the config's keys for these options.
      default: values for all that is in neither, with a number for each channel.

    Raises:
      InputError: for numbers that are not finite, a deviation that is not above 0, or a number of
        values that does not fit the channels. The message names the key or the file.
    """
    chosen = {key: value for key, value in options.items() if value is not None}
    beside = next(filter(None, (_read(weights.parent / name) for name in BESIDE)), {})
    values = {"unit": 1.0, **default._asdict(), **beside, **chosen}
    names = {x: prefix + x if x in chosen else f"{values['source']}: {x}" for x in values}
    units = {x: 1.0 if x in chosen else values["unit"] for x in values}
    mean, std = (
        _numbers(values[x], names[x], len(default.mean), x == "std", units[x])
        for x in ("mean", "std")
    )
    if (resizing := values["interpolation"]) not in ("", *RESIZING):
        key = names["interpolation"]
        raise InputError(f"{key} {resizing!r:.40} is not one of {', '.join(RESIZING)}")
    size = _size(values["size"], names["size"])
    return Normalisation(mean, std, size, resizing, values["source"], (*chosen,))


def _read(file: Path) -> JsonObject:
    """Returns the fields of a `Normalisation` in a file, and its `unit`.

    {} if it has none. Mean and std are those of pixels from 0 to `unit`, because transformers may
    rescale pixels by another factor than 1/255.
    """
    fields = files.read_json(file) if file.is_file() else {}
    if fields.keys() & {"image_mean", "do_normalize"}:  # transformers
        is_plain, resample = fields.get("do_normalize") is False, fields.get("resample")
        factor = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
        unit = 255 * _numbers(factor, f"{file}: rescale_factor", 1, is_positive=True)[0]
        fields = {
            "mean": 0.0 if is_plain else fields.get("image_mean"),
            "std": 1.0 if is_plain else fields.get("image_std"),
            "unit": 1.0 if math.isclose(unit, 1) else unit,
            "input_size": fields.get("crop_size" if fields.get("do_center_crop") else "size"),
            "interpolation": dict(zip("0123", RESIZING, strict=True)).get(str(resample), resample),
        }
    fields = fields.get("pretrained_cfg") or fields  # timm's two forms, and a release
    if not isinstance(fields, dict) or "mean" not in fields:
        return {}
    optional = {"size": fields.get("input_size"), "interpolation": fields.get("interpolation")}
    needed = {"source": str(file), "mean": fields["mean"], "std": fields.get("std")}
    return needed | {"unit": fields.get("unit", 1.0)} | {k: x for k, x in optional.items() if x}


def _numbers(
    value: Any, name: str, channels: int, is_positive: bool, unit: float = 1.0
) -> tuple[float, ...]:
    """Returns one number for each channel, divided by `unit`."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    least, kind = (1 / LARGEST, "positive") if is_positive else (-LARGEST, "finite")
    if not numbers or not all(type(x) in (int, float) and least <= x <= LARGEST for x in numbers):
        raise InputError(f"{name} is {value!r:.80}: one or three {kind} numbers are needed")
    if len(numbers) not in (1, channels) and (len(numbers), channels) != (3, 1):
        raise InputError(f"{name} is {value!r:.80}: {len(numbers)} numbers for {channels} channels")
    if len(numbers) != channels:
        numbers = [math.fsum(numbers) / len(numbers)] * channels
    return tuple(number / unit for number in numbers)


def _size(value: Any, name: str) -> tuple[int, int] | None:
    """Returns height and width, of a number, a pair, a dict of transformers or timm's (c, h, w)."""
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    height, width = value[-2:] if isinstance(value, list | tuple) and value[1:] else (value, value)
    if height is width is None:
        return None
    if not all(type(x) is int and 0 < x <= LARGEST_SIDE for x in (height, width)):
        raise InputError(f"{name} is {value!r:.80}: pixels from 1 to {LARGEST_SIDE:,} are needed")
    return height, width
