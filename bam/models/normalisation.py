"""What pixels the weights of a pretrained network expect, as the file beside them says it.

timm writes `config.json`, transformers `preprocessor_config.json`, `bam export` `model.json`.
`crop_pct` is not read: the middle of an image is cut out at its import.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bam import files
from bam.errors import InputError
from bam.files import JsonObject

BESIDE = ("preprocessor_config.json", "config.json", "model.json")
# How images are resized: Pillow's names, in the order of its numbers, which transformers writes.
RESIZING = ("nearest", "lanczos", "bilinear", "bicubic")
LARGEST, LARGEST_SIDE = 2.0**31, 4096


class Normalisation(NamedTuple):
    """A network's inputs: `(x - mean) / std` of pixels x in [0, 1].

    Attributes:
      mean, std: of each channel.
      size: height and width of the images that the weights were trained on; None: unknown.
      interpolation: one of `RESIZING`, by which images were resized to that; "": unknown.
      source: the file that says so; "": none does.
      given: which of these whoever trains gave instead.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    interpolation: str = ""
    source: str = ""
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        """All of it, for people."""
        each = (x if len({*x}) > 1 else x[:1] for x in (self.mean, self.std))
        mean, std = (", ".join(f"{number:.6g}" for number in x) for x in each)
        size = f"{self.size[0]} × {self.size[1]}" if self.size else ""
        values = filter(None, (f"mean {mean}", f"std {std}", size, self.interpolation))
        by = [f"{', '.join(self.given)} as given"] if self.given else []
        if self.source or not {"mean", "std"} <= {*self.given}:
            by += [self.source or "no file beside the weights says what they expect"]
        return f"{'; '.join(values)} ({'; '.join(by)})"


def of_weights(
    weights: Path, given: Mapping[str, Any], prefix: str, default: Normalisation
) -> Normalisation:
    """What a file of weights expects of images: as given, else as the file beside it says.

    Args:
      weights: the file; the first of `BESIDE` in its folder that says it is taken.
      given: `mean`, `std` (one number is for all channels; three are averaged for grey images)
        and `size` (pixels), each None if it is not given.
      prefix: what the config's keys of these begin with.
      default: where neither says it, with a number for each channel.

    Raises:
      InputError: in one line that names key or file, for numbers that are not finite, a deviation
        that is not above 0, or as many numbers as there are no channels.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    beside = next(filter(None, (_facts(weights.parent / name) for name in BESIDE)), {})
    values = {"unit": 1.0, **default._asdict(), **beside, **chosen}
    names = {x: prefix + x if x in chosen else f"{values['source']}: {x}" for x in values}
    units = {x: 1.0 if x in chosen else values["unit"] for x in values}
    mean, std = (
        _numbers(values[x], names[x], len(default.mean), x == "std", units[x])
        for x in ("mean", "std")
    )
    if (resizing := values["interpolation"]) not in ("", *RESIZING):
        of = names["interpolation"]
        raise InputError(f"{of} {resizing!r:.40} is none of {', '.join(RESIZING)}")
    size = _size(values["size"], names["size"])
    return Normalisation(mean, std, size, resizing, values["source"], (*chosen,))


def _facts(file: Path) -> JsonObject:
    """What a file says of pixels; nothing if it is not there."""
    facts = files.read_json(file) if file.is_file() else {}
    if facts.keys() & {"image_mean", "do_normalize"}:  # transformers
        is_plain, resample = facts.get("do_normalize") is False, facts.get("resample")
        factor = facts.get("rescale_factor", 1 / 255) if facts.get("do_rescale", True) else 1.0
        unit = 255 * _numbers(factor, f"{file}: rescale_factor", 1, is_positive=True)[0]
        facts = {
            "mean": 0.0 if is_plain else facts.get("image_mean"),
            "std": 1.0 if is_plain else facts.get("image_std"),
            "unit": 1.0 if math.isclose(unit, 1) else unit,
            "input_size": facts.get("crop_size" if facts.get("do_center_crop") else "size"),
            "interpolation": dict(zip("0123", RESIZING, strict=True)).get(str(resample), resample),
        }
    facts = facts.get("pretrained_cfg") or facts  # timm's, or its flat form, or a release's
    if not isinstance(facts, dict) or "mean" not in facts:
        return {}
    optional = {"size": facts.get("input_size"), "interpolation": facts.get("interpolation")}
    said = {"source": str(file), "mean": facts["mean"], "std": facts.get("std")}
    return said | {"unit": facts.get("unit", 1.0)} | {k: x for k, x in optional.items() if x}


def _numbers(
    value: Any, name: str, channels: int, is_positive: bool, unit: float = 1.0
) -> tuple[float, ...]:
    """A number for each channel, in this unit."""
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
    """Height and width, of pixels or, as timm has it, channels, height and width."""
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    height, width = value[-2:] if isinstance(value, list | tuple) and value[1:] else (value, value)
    if height is width is None:
        return None
    if not all(type(x) is int and 0 < x <= LARGEST_SIDE for x in (height, width)):
        raise InputError(f"{name} is {value!r:.80}: pixels from 1 to {LARGEST_SIDE:,} are needed")
    return height, width
