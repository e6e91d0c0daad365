"""Applies a fixed map to each image once and keeps the features on disk, for training on them.

Such a map costs no privacy under two conditions. First, it was not fitted to the private data; its
author must know that. Second, it maps every image on its own; that is tested before it is used.

Images are mapped in chunks of `CHUNK` rows, and XLA may round a row differently at another place in
a chunk. Neighbouring data sets differ in one row, which is blank in one of them. All other rows
keep their places and therefore every bit of their features. If the row were deleted and later rows
moved up, their features could differ in the last bit wherever the compiled map depends on the
place. It has not been shown that maps on GPUs and TPUs do not depend on it.
"""

import hashlib
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float16, Num

from bam import memory, waits
from bam.data.common import DataError
from bam.data.datasets import Dataset
from bam.data.stream import StoredImages, content
from bam.files import keep, make_folder, replace
from bam.text import plural

# Images `[n, h, w, c]`, float32 in [0, 1] -> features `[n, h', w', c']`, each row from its image.
FeatureMap = Callable[[Float[np.ndarray | Array, "n h w c"]], Float[Array, "n h2 w2 c2"]]

Images: TypeAlias = np.ndarray | Array | StoredImages
Computed = Callable[[np.ndarray], Array]  # compiled: images of a data set -> float16 features

FORMAT = 1  # version of the files
CHUNK = 256  # images mapped in one call
PIECE = 32  # images of a chunk that a device maps at once
PROBED = 8  # rows computed again: in another batch, to detect mixing, and to check the disk
# Rows that differ by more than this share of the largest feature are not equal; float16 rounds by
# at most 1/2048.
TOLERANCE = 1e-2
# Features on disk may differ by RELATIVE of themselves (two roundings of float16, because XLA may
# round a row differently at another place) plus ABSOLUTE of the largest one.
RELATIVE, ABSOLUTE = 2**-10, 1e-4


def extract(
    dataset: Dataset,
    feature_map: FeatureMap,
    map_options: Mapping[str, object],
    folder: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """The data set of float16 features, with mean 0 and std 1 so that nothing normalises them.

    Args:
      dataset: a data set of images, uint8 or float.
      feature_map: see `FeatureMap`. It is compiled, and called with `CHUNK` images.
      map_options: JSON values that identify the map; with the images they give the fingerprint.
      folder: folder for a file `FINGERPRINT.npy` of each split, which is as private as the images;
        None keeps no file.
      log: called with a line about each slow part.

    Raises:
      InputError: if the map does not fit the memory.
      DataError: if the map mixes images, or a feature is not finite in float16.
    """
    alone = jax.jit(lambda images: to_features(feature_map, images))
    images = dataset.train.images
    like = jax.ShapeDtypeStruct((CHUNK, *images.shape[1:]), images.dtype)
    with waits.compiling(log, "the feature map"):
        traced = jax.make_jaxpr(alone)(like)
        computed, program = _on_all_devices(alone, traced), _digest(traced)
        memory.check(
            computed,
            np.zeros(like.shape, like.dtype),
            what=f"mapping {CHUNK} images to features",
            remedy="close other programs, take a smaller map, or import smaller images",
        )
        _check_rows(computed, images)
    return _with_images(
        dataset,
        lambda images: load_or_compute(computed, program, images, map_options, folder, log),
    )


def blank(dataset: Dataset, feature_map: FeatureMap) -> Dataset:
    """A data set with zeros for features. Only shapes are computed, and zeros take no memory."""

    def zeros(images: Images) -> np.ndarray:
        like = jax.ShapeDtypeStruct(images.shape, images.dtype)
        mapped = jax.eval_shape(lambda x: to_features(feature_map, x), like)
        return np.broadcast_to(np.zeros((), mapped.dtype), mapped.shape)

    return _with_images(dataset, zeros)


def to_features(
    feature_map: FeatureMap, images: Num[np.ndarray | Array, "n h w c"]
) -> Float16[Array, "n h2 w2 c2"]:
    """Returns the features of a data set's images in float16.

    uint8 pixels are scaled to [0, 1] for the map.
    """
    if images.dtype != np.uint8 and not jnp.issubdtype(images.dtype, jnp.floating):
        raise DataError(f"a feature map takes uint8 pixels or floats in [0, 1], not {images.dtype}")
    pixels = jnp.asarray(images).astype(jnp.float32)
    features = feature_map(pixels / 255 if images.dtype == np.uint8 else pixels)
    if features.ndim != 4 or features.shape[0] != images.shape[0]:
        raise DataError(
            f"the feature map made shape {features.shape} from images {images.shape}: expected "
            "[n, height, width, channels], a row for each image"
        )
    return features.astype(jnp.float16)


def _with_images(dataset: Dataset, new: Callable[[Images], np.ndarray]) -> Dataset:
    """The data set with `new(images)` in each split, mean 0, std 1 and `mapped_from`."""
    train, test = (x._replace(images=new(x.images)) for x in (dataset.train, dataset.test))
    images, channels = dataset.train.images, train.images.shape[-1]
    mean, std = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    mapped = dataset._replace(train=train, test=test, mean=mean, std=std)
    # A data set of the user's own may be a tuple that lacks the fields with defaults.
    if not hasattr(mapped, "mapped_from"):
        return mapped
    return mapped._replace(mapped_from=jax.ShapeDtypeStruct(images.shape[-3:], images.dtype))


def _check_rows(computed: Computed, images: Images) -> None:
    """DataError for a map with which the features of an image depend on the images beside it."""
    probed = images[np.arange(PROBED) % len(images)]
    bright = 255 if images.dtype == np.uint8 else probed.max() + 1
    alone = in_chunks(computed, probed)  # in a chunk that is filled up with black images
    # In reverse order and far apart in a chunk of bright images.
    places = np.arange(PROBED)[::-1] * (CHUNK // PROBED) + 3
    crowd = np.full((CHUNK, *images.shape[1:]), bright, images.dtype)
    crowd[places] = probed
    if np.isfinite(alone).all() and not _equal(alone, in_chunks(computed, crowd)[places]):
        raise DataError(
            "the features of an image depend on the images beside it (BatchNorm in training mode "
            "does that), so ε would not hold: use a map of each image alone"
        )


def load_or_compute(
    computed: Computed,
    program: bytes,
    images: Images,
    map_options: Mapping[str, object],
    folder: Path | None,
    log: Callable[[str], None],
) -> np.ndarray:
    """Loads the features of a split, or computes and writes them.

    They are loaded if the same map wrote them to the disk. A file ends with the digest of the map's
    program, and `PROBED` rows are computed again. The digest detects every change, except in JAX
    itself, in the device and behind a callback to Python. The rows may detect these.
    """
    if folder is None:
        return _all_rows(computed, images, log)
    file = folder / f"{_fingerprint(images, map_options)}.npy"
    stored, stored_program = _read(file, log)
    if stored is not None:
        probed = np.linspace(0, len(images) - 1, PROBED).astype(int)
        expected = in_chunks(computed, images[probed])
        fits = stored.dtype == np.float16 and stored.shape == (len(images), *expected.shape[1:])
        if fits and stored_program == program and _is_close(stored[probed], expected):
            return stored
        log(f"{file} has other features than this map: computing them again")
    log(f"features of {plural(len(images), 'image')}, computed once and kept in {folder}")
    features = _all_rows(computed, images, log)
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder) as private:  # other users cannot read in it
            partial = Path(private, file.name)
            np.save(partial, features)
            with partial.open("ab") as opened:
                opened.write(program)
            partial.chmod(0o600)
            replace(partial, file)
        keep(file)
    except OSError as error:
        log(f"the features could not be written: {error}")
    return features


def _read(file: Path, log: Callable[[str], None]) -> tuple[np.ndarray | None, bytes]:
    """Returns the features in a file and the digest behind them.

    Returns (None, b"") if there is no file that can be read.
    """
    try:
        with file.open("rb") as opened:
            return np.lib.format.read_array(opened, allow_pickle=False), opened.read(33)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # NumPy raises many kinds of errors for a damaged file
        log(f"{file} cannot be read ({type(error).__name__}): computing features again")
    return None, b""


def _on_all_devices(alone: Computed, traced: ClosedJaxpr) -> Computed:
    """Returns the map of a chunk, on all devices, each with some of its pieces.

    The pieces have one size, so that a row has the same bits on any number of devices. `bam` makes
    a device of each core of a CPU, because one map alone leaves cores idle. A map that calls back
    to Python stays on one device: callbacks of several could wait for one another.
    """

    def in_pieces(images: Array) -> Array:
        pieces = images.reshape(-1, PIECE, *images.shape[1:])
        features = jax.lax.map(alone, pieces)
        return features.reshape(len(images), *features.shape[2:])

    num_devices = math.gcd(CHUNK // PIECE, jax.local_device_count())
    if num_devices == 1 or "callback" in str(traced):
        return jax.jit(in_pieces)
    mesh, rows = Mesh(jax.local_devices()[:num_devices], ("rows",)), PartitionSpec("rows")
    shared = jax.shard_map(in_pieces, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(shared)


def _digest(traced: ClosedJaxpr) -> bytes:
    """A digest of a traced map: its operations and the constants that it holds."""
    digest, seen = hashlib.blake2b(digest_size=16), [traced]
    for program in seen:  # the loop below appends to it
        # Names of functions come with addresses, which differ from process to process.
        digest.update(re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr)).encode())
        for number in map(np.asarray, program.consts):
            digest.update(f"{number.dtype}{number.shape}".encode() + number.tobytes())
        for equation in program.jaxpr.eqns:
            inner = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "consts"))
            seen += [x for x in inner if hasattr(x, "consts")]
    return digest.hexdigest().encode()


def _all_rows(computed: Computed, images: Images, log: Callable[[str], None]) -> np.ndarray:
    """Returns the features of all images.

    Raises DataError if one is not finite.
    """
    features = in_chunks(computed, images, log)
    bad = ~np.isfinite(features).all(axis=(1, 2, 3))
    if bad.any():
        raise DataError(f"features of image {np.flatnonzero(bad)[0]} are not finite in float16")
    return features


def in_chunks(
    computed: Computed, images: Images, log: Callable[[str], None] = lambda line: None
) -> np.ndarray:
    """Features of any number of images, in padded chunks of one size, so the map compiles once.

    With several chunks, the log hears an estimate of the time, from that of the first.
    """

    def chunk(start: int) -> np.ndarray:
        rows = images[start : start + CHUNK]
        padding = np.zeros((CHUNK - len(rows), *images.shape[1:]), images.dtype)
        return np.asarray(computed(np.concatenate([rows, padding])))[: len(rows)]

    began, chunks = time.perf_counter(), [chunk(0)]
    later = range(CHUNK, len(images), CHUNK)
    about = len(later) * (time.perf_counter() - began)
    num = plural(len(images), "image")
    with waits.awaited(log, f"computing features of {num}", about):
        chunks += map(chunk, later)
    return np.concatenate(chunks)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether features of the same images in two batches are equal up to `TOLERANCE`."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    return bool(np.abs(a - b).max() <= TOLERANCE * np.abs(b).max())


def _is_close(stored: np.ndarray, expected: np.ndarray) -> bool:
    """Whether features on disk are those of the map, up to `RELATIVE` and `ABSOLUTE`."""
    a, b = stored.astype(np.float32), expected.astype(np.float32)
    bound = RELATIVE * np.abs(b) + ABSOLUTE * np.abs(b).max()
    return bool((np.abs(a - b) <= bound).all())


def _fingerprint(images: Images, map_options: Mapping[str, object]) -> str:
    """A hash of the map's options and of all images."""
    header = [FORMAT, dict(map_options), str(images.dtype), images.shape]
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    digest.update(content(images))
    return digest.hexdigest()
