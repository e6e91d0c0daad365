"""Predictions of a release for image files, whose pixels are made as in its training.

The release may be untrusted: its network is traced and compiled before a file is read, so that
its shapes and its memory are known first.
"""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Float
from scipy import special

from bam import memory
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing, Target
from bam.extras import MissingExtraError
from bam.files import JsonObject
from bam.images import listing, rows
from bam.images.pixels import decode
from bam.release.load import Released, features_name

TOGETHER = 16  # images in a batch, at most; all batches have one size, so XLA compiles once
DIGITS = 6  # significant digits of a predicted number, at least
SHARE = 4  # the network may use a quarter of the machine's memory; other programs need some

# The network's outputs for an image, or the error of its file.
Outputs: TypeAlias = Float[np.ndarray, " classes"] | DataError


def images_of(
    paths: Sequence[Path], on_bare: Callable[[Path], None] = lambda file: None
) -> dict[Path, str]:
    """Image file -> name of its class folder, for the files and all images in the folders.

    `on_bare` is called with each file of a folder that is left out because it has no suffix.
    DataError for a path that does not exist, or a folder without images.
    """
    images: dict[Path, str] = {}
    for path in paths:
        if not (path.is_dir() or path.is_file()):
            raise DataError(f"{path}: no such file or folder")
        if path.is_dir():
            tree = listing.tree(path)
            files, bare = sorted(tree.images), tree.bare
        else:
            files, bare = [path], []
        if not files:
            raise DataError(
                f"{path}: no images in this folder ({', '.join(listing.SUFFIXES)}): name files "
                "without such a suffix one by one"
            )
        for file in bare:
            on_bare(file)
        images |= {file: _class_folder(file.relative_to(path).parts[:-1]) for file in files}
    return images


def _class_folder(above: Sequence[str]) -> str:
    """Returns CLASS for a file in CLASS/… or train/CLASS/….

    It returns "" for a file without a class folder.
    """
    is_split = len(above) > 1 and listing.split_name(above[0]) != ""
    return rows.normal((*above, "")[is_split])


def preprocessing_of(released: Released) -> Preprocessing:
    """Returns how files become pixels for a release.

    Without a record, the shape of the network's inputs decides. DataError if the network does not
    take such images, or does not return a row of numbers for each.
    """
    metadata, takes = released.facts, released.takes
    if takes is None:
        raise DataError(
            "the release does not record the size or the type of its images, so no files can be "
            "predicted: train it again with this version of bam"
        )
    # A backbone's weights or a user's own map are not in the release.
    if takes.dtype != np.uint8:
        features = features_name(metadata)
        what = f"features ({features})" if features else "numbers"
        remedy = ""
        if features == "backbone":
            digest = metadata["features"].get("digest", "in its PRIVACY.md")
            remedy = f": add --weights=FILE, the backbone's weights, whose SHA-256 is {digest}"
        raise DataError(f"the release takes {what}, not image files{remedy}")
    *size, channels = takes.shape
    by_shape = {"size": size, "channels": channels}
    # Checked by `Preprocessing`: an untrusted size decides how much memory a picture takes.
    preprocessing = Preprocessing.from_json(metadata["preprocessing"] or by_shape)
    images = jax.ShapeDtypeStruct((TOGETHER, *preprocessing.shape), np.uint8)
    try:
        # Traced and not run: a mismatch of shapes shows before any file is read.
        outputs = jax.eval_shape(released.logits, released.params, images)
    except Exception as error:  # every type: untrusted options reach any layer
        raise DataError(f"the network does not take images of shape {images.shape[1:]}") from error
    # Outputs for each pixel, for example, would not fit into a row.
    if outputs.ndim != 2:
        raise DataError(f"outputs of shape {outputs.shape[1:]} are not a row of a table")
    return preprocessing


def outputs_of(
    released: Released,
    preprocessing: Preprocessing,
    files: Sequence[Path],
    num_workers: int = 1,
    on_empty: Callable[[Path], None] = lambda file: None,
) -> Iterator[Outputs]:
    """Yields the network's outputs for each file, in order.

    A file that fails gets its error instead. `on_empty` is called with each file whose pixels, with
    the release's size and window, have one colour only. DataError if the network needs too much
    memory for a single image.
    """
    together = num_together(released, preprocessing)

    def read(file: Path) -> np.ndarray | DataError:
        try:
            return decode(file, preprocessing)
        except (DataError, MissingExtraError) as error:  # some formats need an extra
            return DataError(str(error))

    def each() -> Iterator[Outputs]:
        with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:  # Pillow frees the GIL
            for start in range(0, len(files), together):
                images = list(pool.map(read, files[start : start + together]))
                # Always `together` rows, the last ones zero: another size would compile anew.
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
                    # Weights may be NaN or huge, and argmax makes a class of NaN, too.
                    if np.isfinite(output).all():
                        yield output
                    else:
                        yield DataError(f"{file}: the network's outputs are not finite")

    return each()


def num_together(released: Released, preprocessing: Preprocessing) -> int:
    """The size of a batch: as many images, up to `TOGETHER`, as fit into the network's memory.

    The memory that XLA states for the compiled program decides, before the program runs: a small
    release can describe a network whose layers fill any memory for a large image, and the operating
    system would kill the process. DataError if one image does not fit.
    """
    logits: Any = released.logits
    together, budget = TOGETHER, min(memory.machine() // SHARE, memory.free())
    while True:
        images = jax.ShapeDtypeStruct((together, *preprocessing.shape), np.uint8)
        needed = logits.lower(released.params, images).compile().memory_analysis()
        num_bytes = 3 * images.size  # decoded, in the batch, and on the device
        num_bytes += needed.temp_size_in_bytes + needed.output_size_in_bytes if needed else 0
        if num_bytes <= budget:
            return together
        if together == 1:
            raise DataError(
                f"the network takes {num_bytes:,} bytes for an image of {preprocessing.shape}, "
                f"more than {budget:,} bytes: a {SHARE}th of the memory, or the free part of it"
            )
        # By the share that fits, at least one less: memory need not be linear in the batch.
        together = max(1, min(together - 1, together * budget // num_bytes))


def table(
    metadata: JsonObject, outputs: Sequence[Outputs], top: int | None = None
) -> list[list[str]]:
    """A header, and a row of texts for each image, empty for an image with an error.

    With classes, the columns are the class, its probability, and the probability of every class or
    the `top` likeliest ones. With several labels they are the labels' probabilities; with numbers,
    the numbers in the units of the data.

    Args:
      metadata: the contents of `model.json`.
      outputs: as `outputs_of` yields them.
      top: number of classes to list; None for the probabilities of all.

    Raises:
      DataError: for a `top` where the network does not predict classes.
    """
    loss = metadata["loss"]
    names, is_class = metadata["classes"], loss == "cross_entropy"
    target = Target(*(metadata["preprocessing"].get("target") or ()))
    if top is not None and not is_class:
        raise DataError(f"--top={top} needs a release of classes, but its loss is {loss}")
    first, each = ["class", "probability"], [f"p({name})" for name in names]
    most = min(top or 1, len(names))
    header = first + (
        each if top is None else [f"{x}_{k}" for k in range(2, most + 1) for x in first]
    )
    if not is_class:
        numbers = ["value"] if len(names) == 1 else [f"value_{name}" for name in names]
        header = each if loss == "binary" else numbers

    digits = target.digits(DIGITS)

    def texts(output: np.ndarray) -> list[str]:
        wide = output.astype(float)
        if not is_class:
            values = special.expit(wide) if loss == "binary" else target.in_units(wide)
            return _texts(values, digits)
        probabilities = _texts(special.softmax(wide))
        likeliest = np.argsort(-wide, kind="stable")[:most]  # a tie as in argmax
        ranked = [x for k in likeliest for x in (names[k], probabilities[k])]
        return ranked + (probabilities if top is None else [])

    empty = [""] * len(header)
    return [header, *(empty if isinstance(x, DataError) else texts(x) for x in outputs)]


def _texts(numbers: np.ndarray, digits: int = DIGITS) -> list[str]:
    return [f"{x:.{digits}g}" for x in numbers.tolist()]
