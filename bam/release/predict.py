"""What a release says of image files, which become pixels as those that it was trained on."""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy.special
from jaxtyping import Float

from bam.data import listing
from bam.data.common import DataError, decode_images
from bam.data.pixels import Preprocessing, encoded
from bam.files import JsonObject
from bam.release.load import Released

TOGETHER = 16  # images at once, so that any number of files is one compilation

# The network's outputs of an image, or why there are none.
Outputs: TypeAlias = Float[np.ndarray, " classes"] | DataError


class Image(NamedTuple):
    """An image file, and the class whose name its folder has; "": it was named by itself."""

    file: Path
    label: str = ""


def images_of(paths: Sequence[Path]) -> list[Image]:
    """Files as they are named, and of each folder all images in it, each once.

    DataError for a path to nothing, or a folder without images.
    """
    images: dict[Path, Image] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        within = _images_in(path) if path.is_dir() else [Image(path)]
        if not within:
            raise DataError(f"{path}: no image in it ({', '.join(sorted(listing.SUFFIXES))})")
        for image in within:
            images.setdefault(image.file, image)
    return list(images.values())


def _images_in(folder: Path) -> list[Image]:
    """The label is the name of the first folder on the way to an image."""
    images = []
    for file in sorted(folder.rglob("*")):
        *folders, name = file.relative_to(folder).parts
        is_hidden = any(part.startswith((".", "__MACOSX")) for part in (*folders, name))
        if file.suffix.lower() in listing.SUFFIXES and file.is_file() and not is_hidden:
            images.append(Image(file, folders[0] if folders else ""))
    return images


def preprocessing_of(facts: JsonObject) -> tuple[Preprocessing, str]:
    """How a release wants its files made into pixels, and a line where it does not say so.

    DataError if no image file can be made into its inputs.
    """
    features = (facts.get("features") or {}).get("name", "")
    if facts["preprocessing"] is not None:
        return Preprocessing.from_json(facts["preprocessing"]), ""
    if features:
        raise DataError(f"the release does not say which images its features ({features}) are of")
    height, width, channels = facts["image_shape"]
    try:
        assumed = Preprocessing.from_json({"size": [height, width], "channels": channels})
    except DataError:
        raise DataError(
            f"no image file has the shape {facts['image_shape']} of its inputs"
        ) from None
    size = f"{height} × {width} × {channels}"
    return assumed, f"the release says the size of its images alone, {size}: the rest is assumed"


def outputs_of(
    released: Released, preprocessing: Preprocessing, images: Sequence[Image], num_workers: int = 1
) -> Iterator[Outputs]:
    """The network's outputs of each image, in order; errors are of one image alone."""
    shape = preprocessing.shape

    def pixels(image: Image) -> np.ndarray | DataError:
        try:
            return decode_images([encoded(image.file, preprocessing)], str(image.file), shape)[0]
        except DataError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:  # Pillow frees the GIL
        for start in range(0, len(images), TOGETHER):
            read = list(pool.map(pixels, images[start : start + TOGETHER]))
            batch = np.zeros((TOGETHER, *shape), np.uint8)
            for row, each in enumerate(read):
                batch[row] = 0 if isinstance(each, DataError) else each
            outputs = np.asarray(released.logits(released.params, batch))
            if outputs.ndim != 2:
                raise DataError(f"outputs of shape {outputs.shape[1:]} are no row of a table")
            for image, each, output in zip(images[start:], read, outputs, strict=False):
                if isinstance(each, DataError):
                    yield each
                elif not np.isfinite(output).all():
                    yield DataError(f"{image.file}: the network's outputs are not finite")
                else:
                    yield output


class Table(NamedTuple):
    """The columns of what is predicted, and the texts in them of an image's outputs."""

    header: list[str]
    texts: Callable[[np.ndarray], list[str]]

    def cells(self, outputs: Outputs) -> list[str]:
        """The texts of an image, empty ones if there are no outputs of it."""
        has_none = isinstance(outputs, DataError)
        return [""] * len(self.header) if has_none else self.texts(outputs)


def table(facts: JsonObject, top: int | None) -> Table:
    """Columns by the loss: a class and probabilities, probabilities of labels, or numbers.

    Args:
      facts: of a release.
      top: so many classes, the likeliest first, instead of a column for each; None: that.

    Raises:
      DataError: for a `top` of what are no classes.
    """
    names = facts["classes"] or [str(k) for k in range(facts["num_classes"])]
    each = [f"p({name})" for name in names]
    if facts["loss"] != "cross_entropy" and top is not None:
        raise DataError(f"--top is for classes; the release is of loss {facts['loss']}")
    if facts["loss"] == "binary":
        return Table(each, lambda output: _texts(scipy.special.expit(output.astype(float))))
    if facts["loss"] != "cross_entropy":
        single = facts["num_classes"] == 1
        return Table(["value"] if single else [f"value_{name}" for name in names], _texts)
    if top is None:
        return Table(
            ["class", "probability", *each],
            lambda output: _ranked(names, output, 1) + _texts(probabilities(output)),
        )
    most = min(top, len(names))
    more = [f"{what}_{k}" for k in range(2, most + 1) for what in ("class", "probability")]
    return Table(["class", "probability", *more], lambda output: _ranked(names, output, most))


def probabilities(logits: Float[np.ndarray, " classes"]) -> Float[np.ndarray, " classes"]:
    """The softmax, in float64."""
    return np.asarray(scipy.special.softmax(logits.astype(float)))


def _ranked(names: Sequence[str], logits: np.ndarray, most: int) -> list[str]:
    likeliest = np.argsort(-logits, kind="stable")[:most]  # the first of equals, as in evaluation
    texts = _texts(probabilities(logits))
    return [text for k in likeliest for text in (names[k], texts[k])]


def _texts(numbers: np.ndarray) -> list[str]:
    return [f"{x:.6g}" for x in numbers.tolist()]
