"""What a release says of image files, which become pixels as those that it was trained on."""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float
from scipy import special

from bam.data import listing
from bam.data.common import DataError, decode_images
from bam.data.pixels import Preprocessing, encoded
from bam.files import JsonObject
from bam.release.load import Released

TOGETHER = 16  # images at once: of any number of files, one compilation

# The network's outputs of an image, or why there are none.
Outputs: TypeAlias = Float[np.ndarray, " classes"] | DataError


def images_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Image files as named, and all in the named folders -> the folder of a folder that it is in.

    DataError for a path to nothing, or a folder without images.
    """
    images: dict[Path, str] = {}
    for path in paths:
        if not (path.is_dir() or path.is_file()):
            raise DataError(f"{path}: no such file or folder")
        files = [path] if not path.is_dir() else [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in listing.SUFFIXES and file.is_file()
            if not any(x.startswith((".", "__MACOSX")) for x in file.relative_to(path).parts)
        ]  # fmt: skip
        if not files:
            raise DataError(f"{path}: no image in it ({', '.join(sorted(listing.SUFFIXES))})")
        images |= {file: (*file.relative_to(path).parts[:-1], "")[0] for file in files}
    return images


def preprocessing_of(facts: JsonObject) -> Preprocessing:
    """How a release's files become pixels; of one that does not say so, by the size of its inputs.

    DataError if no image file can be made into its inputs.
    """
    features = (facts.get("features") or {"name": ""})["name"]
    if features and (features != "scattering" or not facts["preprocessing"]):
        raise DataError(f"the release is of features ({features}), not of image files")
    if facts["preprocessing"]:
        return Preprocessing.from_json(facts["preprocessing"])
    *size, channels = facts["image_shape"]
    try:
        return Preprocessing.from_json({"size": size, "channels": channels})
    except DataError as error:
        raise DataError(f"no image file is an input of this release: {error}") from None


def outputs_of(
    released: Released, preprocessing: Preprocessing, files: Sequence[Path], num_workers: int = 1
) -> Iterator[Outputs]:
    """The network's outputs of each file, in order; an error is of one file alone."""

    def read(file: Path) -> np.ndarray | DataError:
        try:
            png = encoded(file, preprocessing)
            return decode_images([png], str(file), preprocessing.shape)[0]
        except DataError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:  # Pillow frees the GIL
        for start in range(0, len(files), TOGETHER):
            images = list(pool.map(read, files[start : start + TOGETHER]))
            batch = np.zeros((TOGETHER, *preprocessing.shape), np.uint8)
            for row, image in enumerate(images):
                batch[row] = 0 if isinstance(image, DataError) else image
            outputs = np.asarray(released.logits(released.params, batch))
            if outputs.ndim != 2:
                raise DataError(f"outputs of shape {outputs.shape[1:]} are no row of a table")
            for file, image, output in zip(files[start:], images, outputs, strict=False):
                if isinstance(image, DataError):
                    yield image
                elif np.isfinite(output).all():
                    yield output
                else:
                    yield DataError(f"{file}: the network's outputs are not finite")


class Table(NamedTuple):
    """The columns of what is predicted, and the texts in them of an image's outputs."""

    header: list[str]
    texts: Callable[[np.ndarray], list[str]]

    def cells(self, outputs: Outputs) -> list[str]:
        """The texts of an image, empty ones if there are no outputs of it."""
        return [""] * len(self.header) if isinstance(outputs, DataError) else self.texts(outputs)


def table(facts: JsonObject, top: int | None = None) -> Table:
    """Columns as the loss has them: a class and probabilities, those of labels, or numbers.

    With `top` there are so many classes, the likeliest first, in place of a column for each.
    DataError for a `top` of what are no classes.
    """
    names = facts["classes"]
    each = [f"p({name})" for name in names]

    def ranked(logits: np.ndarray, most: int) -> list[str]:
        likeliest = np.argsort(-logits, kind="stable")[:most]  # of equals the first, as argmax
        texts = _texts(special.softmax(logits.astype(float)))
        return [text for k in likeliest for text in (names[k], texts[k])]

    def all_classes(logits: np.ndarray) -> list[str]:
        return ranked(logits, 1) + _texts(special.softmax(logits.astype(float)))

    if facts["loss"] == "cross_entropy":
        first, last = ["class", "probability"], min(top or 1, len(names))
        more = [f"{what}_{k}" for k in range(2, last + 1) for what in first]
        if top is None:
            return Table(first + each, all_classes)
        return Table(first + more, lambda logits: ranked(logits, last))
    if top is not None:
        raise DataError(f"the {top} likeliest classes: the release has none, but {facts['loss']}")
    if facts["loss"] == "binary":
        return Table(each, lambda outputs: _texts(special.expit(outputs.astype(float))))
    return Table(["value"] if len(names) == 1 else [f"value_{x}" for x in names], _texts)


def _texts(numbers: np.ndarray) -> list[str]:
    return [f"{x:.6g}" for x in numbers.tolist()]
