"""Training on features: a fixed map is applied to each image once, and the result kept on disk.

Such a map costs no privacy under two conditions. It was not fitted to the private data: its author
must know. And it maps every image by itself: that is tested before it is used.

Images are mapped in chunks of `CHUNK` rows, and XLA may round a row differently at another place of
a chunk. Neighbouring data sets differ in one row, which is empty in one of them; all other rows
keep their places, and so every bit of their features. Were the row deleted instead, and the later
ones moved up, their features could differ in the last bit wherever the compiled map depends on the
place. That it does not has not been shown on GPUs and TPUs.
"""

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Num

from bam import files, waits
from bam.data.common import DataError
from bam.data.datasets import Dataset
from bam.data.stream import StoredImages, content
from bam.files import keep, make_folder, replace

# Images `[n, h, w, c]`, float32, of pixels in [0, 1], -> features `[n, h', w', c']`, row by row.
FeatureMap = Callable[[Float[np.ndarray | Array, "n h w c"]], Float[Array, "n h2 w2 c2"]]

Images: TypeAlias = np.ndarray | Array | StoredImages
Computed = Callable[[np.ndarray], Array]  # compiled: images of a data set -> float16 features

FORMAT = 1  # of the files
CHUNK = 256  # images at once
PROBED = 8  # rows computed again: in another batch, to detect mixing, and to check the disk
# Apart by more than this, of the largest feature, rows are not equal: float16 keeps 1/2048.
TOLERANCE = 1e-2
# Of kept features, of each by itself: two roundings of float16, since XLA may round a row
# differently at another place; and of the largest one.
KEPT, KEPT_OF_LARGEST = 2**-10, 1e-4


def extract(
    dataset: Dataset,
    feature_map: FeatureMap,
    facts: Mapping[str, object],
    folder: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """The data set of features, float16, which are normalised no further (mean 0, deviation 1).

    Args:
      dataset: of images, uint8 or float.
      feature_map: see `FeatureMap`. It is compiled, and called with `CHUNK` images.
      facts: JSON values that name the map: they and the images are a file's fingerprint.
      folder: where features are kept, a file `FINGERPRINT.npy` for each split: as private as the
        images. None: nowhere.
      log: called with a line on what takes time.

    Raises:
      DataError: if rows mix, or a feature is not finite in float16.
    """
    computed = jax.jit(lambda images: to_features(feature_map, images))
    with waits.compiling(log, "the map of images, and trying it"):
        _check_rows(computed, dataset.train.images)
    return _with_images(
        dataset, lambda images: kept_or_computed(computed, images, facts, folder, log)
    )


def blank(dataset: Dataset, feature_map: FeatureMap) -> Dataset:
    """Zeros in place of a data set's features, which take no memory: only shapes are computed."""

    def zeros(images: Images) -> np.ndarray:
        like = jax.ShapeDtypeStruct(images.shape, images.dtype)
        mapped = jax.eval_shape(lambda x: to_features(feature_map, x), like)
        return np.broadcast_to(np.zeros((), mapped.dtype), mapped.shape)

    return _with_images(dataset, zeros)


def to_features(
    feature_map: FeatureMap, images: Num[np.ndarray | Array, "n h w c"]
) -> Float16[Array, "n h2 w2 c2"]:
    """A map's features of images as a data set has them: uint8 pixels are scaled to [0, 1]."""
    if images.dtype != np.uint8 and not jnp.issubdtype(images.dtype, jnp.floating):
        raise DataError(f"a map takes uint8 pixels, or float ones in [0, 1], not {images.dtype}")
    pixels = jnp.asarray(images).astype(jnp.float32)
    features = feature_map(pixels / 255 if images.dtype == np.uint8 else pixels)
    if features.ndim != 4 or len(features) != len(images):
        raise DataError(
            f"features of shape {features.shape} of images {images.shape}: expected "
            "[n, height, width, channels], a row for each image"
        )
    return features.astype(jnp.float16)


def _with_images(dataset: Dataset, new: Callable[[Images], np.ndarray]) -> Dataset:
    train, test = (x._replace(images=new(x.images)) for x in (dataset.train, dataset.test))
    channels = train.images.shape[-1]
    mean, std = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    return dataset._replace(train=train, test=test, mean=mean, std=std)


def _check_rows(computed: Computed, images: Images) -> None:
    """Refuses a map that mixes images: what one becomes must not depend on those beside it."""
    probed = images[np.arange(PROBED) % len(images)]
    bright = 255 if images.dtype == np.uint8 else probed.max() + 1
    alone = in_chunks(computed, probed)  # beside black ones, and each other
    # Far apart, the first one last, bright ones before, between and after them.
    places = np.arange(PROBED)[::-1] * (CHUNK // PROBED) + 3
    crowd = np.full((CHUNK, *images.shape[1:]), bright, images.dtype)
    crowd[places] = probed
    if np.isfinite(alone).all() and not _equal(alone, in_chunks(computed, crowd)[places]):
        raise DataError(
            "the features of an image depend on the images beside it (as with BatchNorm in "
            "training): no guarantee would hold for any of them"
        )


def kept_or_computed(
    computed: Computed,
    images: Images,
    facts: Mapping[str, object],
    folder: Path | None,
    log: Callable[[str], None],
) -> np.ndarray:
    """Features of a split, read if they are there and of the very map, and right for some rows.

    The file ends with a digest of the map's program. That sees every change but those behind a
    callback to Python, in JAX's own code or in the device; for them are the rows.
    """
    if folder is None:
        return _all_rows(computed, images, log)
    file, program = folder / f"{_fingerprint(images, facts)}.npy", _program(computed, images)
    kept, written_by = _read(file, log)
    if kept is not None:
        probed = np.linspace(0, len(images) - 1, PROBED).astype(int)
        expected = in_chunks(computed, images[probed])
        fits = kept.dtype == np.float16 and kept.shape == (len(images), *expected.shape[1:])
        if fits and written_by == program and _is_kept(kept[probed], expected):
            return kept
        log(f"{file} is not what the map makes of these images: computed again")
    log(f"features of {files.counted(len(images), 'image')}, kept in {folder}")
    features = _all_rows(computed, images, log)
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # nobody else can read what is in it
            partial = Path(own, file.name)
            np.save(partial, features)
            with partial.open("ab") as opened:
                opened.write(program)
            partial.chmod(0o600)
            replace(partial, file)
        keep(file)
    except OSError as error:
        log(f"the features are not kept: {error}")
    return features


def _read(file: Path, log: Callable[[str], None]) -> tuple[np.ndarray | None, bytes]:
    """A file's features, None if there is none or a damaged one, and what is behind them."""
    try:
        with file.open("rb") as opened:
            return np.lib.format.read_array(opened, allow_pickle=False), opened.read(33)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # of a damaged file NumPy raises many kinds
        log(f"{file} cannot be read ({type(error).__name__}): computed again")
    return None, b""


def _program(computed: Computed, images: Images) -> bytes:
    """A digest of a map as it is traced: its operations, and the numbers that it holds."""
    like = jax.ShapeDtypeStruct((CHUNK, *images.shape[1:]), images.dtype)
    traced = jax.make_jaxpr(computed)(like)
    digest, seen = hashlib.blake2b(digest_size=16), [traced]
    for program in seen:  # which grows
        # Names of functions come with addresses, another in each process.
        digest.update(re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr)).encode())
        for number in map(np.asarray, program.consts):
            digest.update(f"{number.dtype}{number.shape}".encode() + number.tobytes())
        for equation in program.jaxpr.eqns:
            inner = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "consts"))
            seen += [x for x in inner if hasattr(x, "consts")]
    return digest.hexdigest().encode()


def _all_rows(computed: Computed, images: Images, log: Callable[[str], None]) -> np.ndarray:
    features = in_chunks(computed, images, log)
    bad = ~np.isfinite(features).all(axis=(1, 2, 3))
    if bad.any():
        raise DataError(f"features of image {np.flatnonzero(bad)[0]} are not finite in float16")
    return features


def in_chunks(
    computed: Computed, images: Images, log: Callable[[str], None] = lambda line: None
) -> np.ndarray:
    """A map of any number of images, so many at a time that it is compiled once.

    The first of several chunks tells the log about how long all of them take.
    """

    def chunk(start: int) -> np.ndarray:
        rows = images[start : start + CHUNK]
        padding = np.zeros((CHUNK - len(rows), *images.shape[1:]), images.dtype)
        return np.asarray(computed(np.concatenate([rows, padding])))[: len(rows)]

    began, chunks = time.perf_counter(), [chunk(0)]
    later = range(CHUNK, len(images), CHUNK)
    about = len(later) * (time.perf_counter() - began)
    with waits.awaited(log, f"mapping {files.counted(len(images), 'image')}", about):
        chunks += map(chunk, later)
    return np.concatenate(chunks)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = a.astype(np.float32), b.astype(np.float32)
    return bool(np.abs(a - b).max() <= TOLERANCE * np.abs(b).max())


def _is_kept(kept: np.ndarray, expected: np.ndarray) -> bool:
    a, b = kept.astype(np.float32), expected.astype(np.float32)
    near = KEPT * np.abs(b) + KEPT_OF_LARGEST * np.abs(b).max()
    return bool((np.abs(a - b) <= near).all())


def _fingerprint(images: Images, facts: Mapping[str, object]) -> str:
    named = json.dumps([FORMAT, dict(facts), str(images.dtype), images.shape], sort_keys=True)
    digest = hashlib.blake2b(named.encode(), digest_size=16)
    digest.update(content(images))
    return digest.hexdigest()
