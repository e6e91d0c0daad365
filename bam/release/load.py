"""Reads a release back: the weights, and the network that they belong to.

The release may be untrusted. No file in it may run code here, fill the memory, compute for hours
or fail with anything but an `InputError` of one line. `bam.release.export` writes releases.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PyTree

from bam import models
from bam.core.pytree import Params
from bam.data import datasets
from bam.data.catalogue import DATASETS, FOLDER
from bam.data.common import check_memory
from bam.data.preprocessing import Preprocessing
from bam.errors import InputError
from bam.extras import MissingExtraError, needs
from bam.features import extraction
from bam.files import JsonObject, as_object, read_bytes, user_path
from bam.models import finetune, pretrained
from bam.training import parts

with needs("train"):
    from flax import traverse_util
    from ml_collections import ConfigDict

Shapes: TypeAlias = PyTree  # nested dicts of `jax.ShapeDtypeStruct`, like the parameters

Images: TypeAlias = Num[np.ndarray | Array, "*n h w c"]


class Released(NamedTuple):
    """A released model, ready to use.

    Attributes:
      params: the weights.
      logits: `(params, images) -> [n, classes]`, compiled. The images are `[n, height, width,
        channels]` as in the data set: uint8 pixels, or floats in their own units. If the run
        trained on features by scattering, the prior or a backbone, `logits` computes them. No
        release holds the author's own map, or a backbone's weights: unless `load` got these,
        `images` must be the features.
      prepare: `images -> inputs`, the first step of `logits`: features, if any, then normalisation.
      model: the network as functions of such inputs, to continue training.
      facts: the contents of `model.json`; `classes` are numbers if it has no names.
      takes: shape and dtype of an image for `logits`; None in a release of features by a version
        that did not record them.
    """

    params: Params
    logits: Callable[[Params, Images], Float[Array, "n classes"]]
    prepare: Callable[[Images], Float[Array, "... k"]]
    model: models.Model
    facts: JsonObject
    takes: jax.ShapeDtypeStruct | None


def load(folder: Path | str, own_model: str = "", weights: str = "") -> Released:
    """Reads a release without running any code that its folder names.

    The release may be untrusted.

    Args:
      folder: a folder that `export` wrote; `model.json` and `weights.safetensors` are read.
      own_model: MODULE:FUNCTION of the network, if it is not bam's. It is imported and run, so it
        must be code that you trust.
      weights: the file of the weights of the backbone that made the features, if one did.

    Returns:
      A `Released`. On the same device, its predictions equal those of the run bit for bit. With
      features, rounding to float16 may depend on the number of images.

    Raises:
      InputError: if the files are not a release, or the SHA-256 of weights is not the recorded one.
        That check finds accidents, not fraud, because an attacker can edit both files.
    """
    folder = user_path(folder)
    path, file = folder / "model.json", folder / "weights.safetensors"
    if not path.exists():
        raise InputError(
            f"{folder} is not a release: it has no model.json; give a folder that bam export wrote"
        )
    description = as_object(read_bytes(path, LARGEST_DESCRIPTION), path)
    # Types first: a text where a number belongs would fail somewhere in Flax or NumPy, or pass.
    for key, is_valid in FIELDS.items():
        if key not in description:
            raise InputError(
                f"{path} has no {key!r}: it is damaged, or of an earlier version; "
                "export the run again"
            )
        if not is_valid(description[key]):
            # Cut, because it may be megabytes; as a literal, because it may hold terminal escapes.
            raise InputError(
                f"{path} is damaged: {key} = {description[key]!r:.200} is invalid; copy the "
                "release again"
            )
    num_classes = description["num_classes"]
    classes = description["classes"] = description["classes"] or list(map(str, range(num_classes)))
    if len(classes) != num_classes:
        raise InputError(
            f"{path} is damaged: it has {len(classes)} names for {num_classes} classes"
        )
    try:
        built = build(description, own_model, weights)
    except MissingExtraError:
        raise  # the remedy is an installation, not another file
    except Exception as error:
        # Every type: untrusted options reach any layer, which may raise IndexError,
        # OverflowError, RecursionError or an error of its own.
        damaged = "" if isinstance(error, ValueError) else f"{path} is damaged: "
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"{damaged}{lines[0]}") from error
    # The sizes come from shapes alone, before any weight is allocated or read: a `model.json` of a
    # hundred bytes can describe a network of terabytes, and a weights file can be of any length.
    like = traverse_util.flatten_dict(built.like, sep="/")
    num_bytes = sum(math.prod(x.shape) * max(4, x.dtype.itemsize) for x in like.values())
    check_memory(num_bytes, f"the weights of {path}")
    # The rest is room for the file's header, which holds the names.
    content = read_bytes(file, num_bytes + MIB + 2**10 * len(like))
    tensors = pretrained.tensors(content, file)  # safetensors: a pickle would run code
    if description["weights_sha256"] != hashlib.sha256(content).hexdigest():
        raise InputError(
            f"{file} is damaged: its SHA-256 is not the one in model.json; copy the release again"
        )
    # `export` stores bfloat16 as float32.
    tensors |= {x: tensors[x].astype(jnp.bfloat16) for x in description["bfloat16"] if x in tensors}
    # Before the names become nested dicts: "a" beside "a/x" would make a weight a dict.
    if tensors.keys() != like.keys():
        raise InputError(WRONG_WEIGHTS.format(folder))
    params = traverse_util.unflatten_dict(tensors, sep="/")
    check_shapes(folder, params, built.like)
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def logits(params: Params, images: Images) -> Float[Array, "n classes"]:
        return built.model.logits(params, built.prepare(images))

    return Released(params, logits, built.prepare, built.model, description, built.takes)


MIB = 2**20
LARGEST_DESCRIPTION = 2**26  # bytes of `model.json`, room for the names of many classes
LARGEST_INPUT = 2**26  # numbers in an input: 4096 × 4096 in four channels
LARGEST_SIZE = 10_000  # of an option, such as a width: beyond, a shape may overflow
LARGEST_DEPTH = 512  # JAX traces layer by layer, so a depth of 10,000 would hardly end
LISTS = ("mean", "std", "size")  # the options of a backbone that are lists
WRONG_WEIGHTS = "the weights in {} are not those of the model it describes"


def _are_numbers(
    value: object, kinds: tuple[type, ...] = (int, float), above: float = -math.inf
) -> bool:
    # `type`, because True is an int for isinstance; the bound also excludes NaN, which JSON has.
    return isinstance(value, list) and all(
        type(x) in kinds and abs(x) < 2**31 and x > above for x in value
    )


def _is_section(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    # Among bam's parts only a backbone takes lists; a user's own part may take any.
    is_own = ":" in value["name"]

    def is_option(key: str, x: object) -> bool:
        if isinstance(x, list):
            return (is_own or key in LISTS) and all(is_option(key, each) for each in x)
        largest = LARGEST_DEPTH if key == "depth" else LARGEST_SIZE
        return isinstance(x, str | float) or (isinstance(x, int) and abs(x) <= largest)

    return all(is_option(key, x) for key, x in value.items())


def _are_texts(kind: Any) -> Callable[[Any], bool]:
    """Returns a test for values of type `kind` that consist of strings.

    For a dict, the keys must be strings.
    """
    return lambda value: type(value) is kind and all(isinstance(x, str) for x in value)


# The fields that a `model.json` must have, each with a test of its value.
FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "model": _is_section,
    "num_classes": lambda value: type(value) is int and 0 < value <= 2**20,
    "image_shape": lambda value: (
        _are_numbers(value, (int,), above=0) and math.prod(value) <= LARGEST_INPUT
    ),
    "mean": _are_numbers,
    "std": lambda value: _are_numbers(value, above=0),
    "input_clip_norm": lambda value: _are_numbers([value]),
    "precision": _are_texts(str),
    "loss": _are_texts(str),
    "classes": _are_texts(list),
    "preprocessing": _are_texts(dict),
    "bfloat16": _are_texts(list),
    "weights_sha256": _are_texts(str),
}


class Built(NamedTuple):
    """A network built from its description, without weights.

    `like` has the shapes of the weights.
    """

    model: models.Model
    prepare: Callable[[Images], Float[Array, "... k"]]
    like: Shapes
    takes: jax.ShapeDtypeStruct | None


def build(description: JsonObject, own_model: str, weights: str = "") -> Built:
    """Builds the network that a `model.json` describes.

    `own_model` and `weights` are as for `load`.
    """
    shape, section = tuple(description["image_shape"]), ConfigDict(description["model"])
    # `make_model` imports MODULE:FUNCTION and so runs code: the caller must have named it.
    if ":" in section.name and section.name != own_model:
        raise InputError(
            f"the model is {section.name}, code that is not bam's: if you trust it, add "
            f"--own_model={section.name} (in Python own_model={section.name!r})"
        )
    module = parts.make_model(section, description["num_classes"])
    # XLA's convolution, as in the run's evaluation: the fastest without per-example gradients.
    precision = description["precision"]
    model = models.as_functions(module, shape, convolution="xla", precision=precision)
    none = datasets.Split(np.zeros((0, *shape), np.uint8), np.zeros(0, np.int32))
    mean, std = (np.asarray(description[key], np.float32) for key in ("mean", "std"))
    dataset = datasets.Dataset("", none, none, description["num_classes"], mean, std)
    feature_map = _feature_map(description, weights)

    def prepare(images: Images) -> Float[Array, "... k"]:
        if feature_map is not None:
            images = extraction.to_features(feature_map, images)
        return datasets.prepare(dataset, images, description["input_clip_norm"])

    # It traces the network without computing or allocating a weight.
    like = jax.eval_shape(model.init, jax.random.key(0))
    return Built(model, prepare, like, input_type(description, is_mapped=feature_map is not None))


def features_name(description: JsonObject) -> str:
    """Returns the name of the map that computed a release's features.

    It returns "" without features.
    """
    section = description.get("features") or {"name": ""}
    if not _is_section(section):
        raise TypeError(f"features is {section!r}")
    return str(section["name"])


def _feature_map(description: JsonObject, weights: str) -> extraction.FeatureMap | None:
    """Returns the feature map that a `model.json` names.

    It returns None without features, and for a map that is not here: a user's own map, or a
    backbone without `weights`.
    """
    name = features_name(description)
    if weights and name != "backbone":
        raise InputError(
            f"--weights={weights} is for features by a backbone, and this release has "
            f"{f'features by {name}' if name else 'no features'}: leave it out"
        )
    # A backbone's weights and a user's own map are not in the release. The map is not imported: it
    # would be untrusted code.
    if not name or ":" in name or (name == "backbone" and not weights):
        return None
    section = description["features"]
    if name == "prior":
        # Without a digest, the prior would take this version's weights for those of the run.
        section = {"digest": "none named", **section}
    if name == "backbone":
        if not section.get("digest"):
            raise InputError(
                "the release does not record the SHA-256 of its backbone's weights: export the run "
                "again with this version of bam"
            )
        if not (file := finetune.file_of(weights)).is_file():
            raise InputError(f"--weights={weights}: no file {file}; give the backbone's weights")
        section |= {"weights": weights}
    return parts.make_features(ConfigDict(section))


def input_type(description: JsonObject, is_mapped: bool) -> jax.ShapeDtypeStruct | None:
    """Returns shape and dtype of an image that a release takes as input.

    `is_mapped` tells whether the release maps images to features itself.
    """
    shape, dtype = description.get("raw_shape"), description.get("raw_dtype", "")
    if not (shape is None or FIELDS["image_shape"](shape)) or not isinstance(dtype, str):
        raise TypeError(f"raw_shape is {shape!r:.80} and raw_dtype {dtype!r:.80}")
    if "raw_dtype" not in description:  # of an earlier version
        dtype = "uint8" * _is_of_pixels(description)
    if not is_mapped:
        # Features by a map that is not here are floats.
        is_feature = bool(features_name(description))
        shape = description["image_shape"] if is_feature or dtype else None
        dtype = "" if is_feature else dtype
    elif shape is None:  # an earlier version recorded the size of imported images alone
        made = description["preprocessing"]
        shape = made and Preprocessing.from_json(made).shape
    # Floats of any width are float32 in the network, and so are wider integers.
    kind = np.uint8 if dtype == "uint8" else np.float32
    return jax.ShapeDtypeStruct(tuple(shape), kind) if shape else None


def _is_of_pixels(description: JsonObject) -> bool:
    """Whether a release that does not record it is of pixels: its files or constants say so."""

    def constants(mean: Any, std: Any) -> list[Any]:
        pairs = np.broadcast_arrays(np.asarray(mean, np.float32), np.asarray(std, np.float32))
        return np.broadcast_to(pairs, (2, len(description["mean"]))).tolist()

    # The numbers of breast_cancer are floats.
    entries = [x for name, x in DATASETS.items() if name != "breast_cancer"] + [FOLDER]
    fitting = [x for x in entries if np.size(x.mean) in (1, len(description["mean"]))]
    known = [constants(x.mean, x.std) for x in fitting]
    return (
        bool(description["preprocessing"])
        or constants(description["mean"], description["std"]) in known
    )


def check_shapes(path: Path, params: PyTree, like: Shapes) -> None:
    """InputError, which names `path`, for weights of other shapes or dtypes than the network's."""
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), tree)  # noqa: E731
    if shapes(params) != shapes(like):
        raise InputError(WRONG_WEIGHTS.format(path))
