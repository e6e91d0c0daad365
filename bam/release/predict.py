"""What a release says of image files, which become pixels as those that it was trained on."""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Float
from scipy import special

from bam.data.common import DataError, machine_memory
from bam.data.preprocessing import Preprocessing, Target
from bam.extras import MissingExtraError
from bam.files import JsonObject
from bam.images import listing, rows
from bam.images.pixels import decoded
from bam.release.load import Released

TOGETHER = 16  # images at once, at most: of any number of files, one compilation
DIGITS = 6  # of a number that is predicted, at least
SHARE = 4  # the network may take one part in so many of the machine's memory

# The network's outputs of an image, or why there are none.
Outputs: TypeAlias = Float[np.ndarray, " classes"] | DataError


def images_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Image files as named, and all in the named folders -> the folder of a class that it is in.

    DataError for a path to nothing, or a folder without images.
    """
    images: dict[Path, str] = {}
    for path in paths:
        if not (path.is_dir() or path.is_file()):
            raise DataError(f"{path}: no such file or folder")
        files = sorted(listing.tree(path).images) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path}: no image in it ({', '.join(listing.SUFFIXES)})")
        images |= {file: _class_folder(file.relative_to(path).parts[:-1]) for file in files}
    return images


def _class_folder(above: Sequence[str]) -> str:
    """CLASS, of CLASS/… or of a split's train/CLASS/…; "": the file is in none."""
    is_split = len(above) > 1 and listing.split_name(above[0]) != ""
    return rows.normal((*above, "")[is_split])


def preprocessing_of(released: Released) -> Preprocessing:
    """How a release's files become pixels; of one that does not say so, by its inputs' shape.

    DataError if its network takes no such images, or makes no row of numbers of each.
    """
    facts = released.facts
    features = (facts.get("features") or {"name": ""})["name"]
    if features and (features not in ("prior", "scattering") or not facts["preprocessing"]):
        raise DataError(f"the release is of features ({features}), not of image files")
    *size, channels = facts["image_shape"]
    by_shape = {"size": size, "channels": channels}
    preprocessing = Preprocessing.from_json(facts["preprocessing"] or by_shape)
    images = jax.ShapeDtypeStruct((TOGETHER, *preprocessing.shape), np.uint8)
    try:
        outputs = jax.eval_shape(released.logits, released.params, images)
    except Exception as error:  # whatever the network's layers raise
        raise DataError(f"the network takes no images of shape {images.shape[1:]}") from error
    if outputs.ndim != 2:
        raise DataError(f"outputs of shape {outputs.shape[1:]} are no row of a table")
    return preprocessing


def outputs_of(
    released: Released,
    preprocessing: Preprocessing,
    files: Sequence[Path],
    num_workers: int = 1,
    on_empty: Callable[[Path], None] = lambda file: None,
) -> Iterator[Outputs]:
    """The network's outputs of each file, in order; an error is of one file alone.

    `on_empty` is called with a file that has one colour alone once it has the release's size and
    window. DataError if the network takes too much memory for a single image.
    """
    together = num_together(released, preprocessing)

    def read(file: Path) -> np.ndarray | DataError:
        try:
            return decoded(file, preprocessing)
        except (DataError, MissingExtraError) as error:  # of some formats
            return DataError(str(error))

    def each() -> Iterator[Outputs]:
        with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:  # Pillow frees the GIL
            for start in range(0, len(files), together):
                images = list(pool.map(read, files[start : start + together]))
                batch = np.zeros((together, *preprocessing.shape), np.uint8)
                for row, image in enumerate(images):
                    batch[row] = 0 if isinstance(image, DataError) else image
                outputs = np.asarray(released.logits(released.params, batch))
                for file, image, output in zip(files[start:], images, outputs, strict=False):
                    if isinstance(image, DataError):
                        yield image
                        continue
                    if np.ptp(image) == 0:
                        on_empty(file)
                    if np.isfinite(output).all():
                        yield output
                    else:
                        yield DataError(f"{file}: the network's outputs are not finite")

    return each()


def num_together(released: Released, preprocessing: Preprocessing) -> int:
    """How many images the network takes at once, by what its compiled program says it needs.

    A small release may be of a network whose layers, of large images, fill any memory.
    """
    logits: Any = released.logits
    together, budget = TOGETHER, machine_memory() // SHARE
    while True:
        images = jax.ShapeDtypeStruct((together, *preprocessing.shape), np.uint8)
        needed = logits.lower(released.params, images).compile().memory_analysis()
        num_bytes = 3 * images.size  # as files, a batch and on the device
        num_bytes += needed.temp_size_in_bytes + needed.output_size_in_bytes if needed else 0
        if num_bytes <= budget:
            return together
        if together == 1:
            raise DataError(
                f"the network takes {num_bytes:,} bytes for an image of {preprocessing.shape}; at "
                f"most {budget:,}, a {SHARE}th of this machine's memory, are given to it"
            )
        together = max(1, min(together - 1, together * budget // num_bytes))


def table(facts: JsonObject, outputs: Sequence[Outputs], top: int | None = None) -> list[list[str]]:
    """A row of columns' names, and one of each image's texts, which are empty if it has no outputs.

    The columns are a class, its probability and that of each, or of the `top` likeliest; of several
    labels their probabilities; of numbers these, in the units of the data. DataError for a `top` of
    what are no classes.
    """
    names, is_class = facts["classes"], facts["loss"] == "cross_entropy"
    target = Target(*(facts["preprocessing"].get("target") or ()))
    if top is not None and not is_class:
        raise DataError(f"the release has no {top} likeliest classes: its loss is {facts['loss']}")
    first, each = ["class", "probability"], [f"p({name})" for name in names]
    most = min(top or 1, len(names))
    header = first + (
        each if top is None else [f"{x}_{k}" for k in range(2, most + 1) for x in first]
    )
    if not is_class:
        numbers = ["value"] if len(names) == 1 else [f"value_{name}" for name in names]
        header = each if facts["loss"] == "binary" else numbers

    digits = target.digits(DIGITS)

    def texts(output: np.ndarray) -> list[str]:
        wide = output.astype(float)
        if not is_class:
            is_binary = facts["loss"] == "binary"
            return _texts(special.expit(wide) if is_binary else target.in_units(wide), digits)
        every = _texts(special.softmax(wide))
        likeliest = np.argsort(-wide, kind="stable")[:most]  # of equals the first, as argmax
        return [x for k in likeliest for x in (names[k], every[k])] + (every if top is None else [])

    empty = [""] * len(header)
    return [header, *(empty if isinstance(x, DataError) else texts(x) for x in outputs)]


def _texts(numbers: np.ndarray, digits: int = DIGITS) -> list[str]:
    return [f"{x:.{digits}g}" for x in numbers.tolist()]
