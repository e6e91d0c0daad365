"""A released model, read back: weights, and the network that they are of.

What a release holds is `bam.release.export`'s matter.
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
from bam.data.common import check_memory
from bam.errors import InputError
from bam.extras import MissingExtraError, needs
from bam.features import extraction
from bam.files import JsonObject, as_object, read_bytes, user_path
from bam.models import pretrained
from bam.training import parts

with needs("train"):
    from flax import traverse_util
    from ml_collections import ConfigDict

Shapes: TypeAlias = PyTree  # of parameters: nested dicts of `jax.ShapeDtypeStruct`

Images: TypeAlias = Num[np.ndarray | Array, "*n h w c"]


class Released(NamedTuple):
    """A released model, ready to use.

    Attributes:
      params: the weights.
      logits: `(params, images) -> [n, classes]`, compiled; images `[n, height, width, channels]` as
        the data set has them (uint8 pixels, or float features in their own units), also if the run
        trained on features of them by scattering; by a backbone or a map of its author's own, the
        features.
      prepare: `images -> inputs`: their features, if any, and normalisation, the first thing that
        `logits` does.
      model: the network as functions of such inputs, for training on.
      facts: what `model.json` says: the `classes`, by name or else by number, and more.
    """

    params: Params
    logits: Callable[[Params, Images], Float[Array, "n classes"]]
    prepare: Callable[[Images], Float[Array, "... k"]]
    model: models.Model
    facts: JsonObject


def load(folder: Path | str, own_model: str = "") -> Released:
    """Reads a release back. Nothing that the folder names is run: it may be a stranger's.

    Args:
      folder: as `export` wrote it; `model.json` and `weights.safetensors` are read.
      own_model: MODULE:FUNCTION of the network, if it is none of bam's: code that you trust.

    Returns:
      A `Released`; its predictions are those of the run, on the same device to the bit. With
      features, float16's rounding of a feature may depend on the number of images.

    Raises:
      InputError: if the files are not such a release, or the weights have another SHA-256 than it
        says: a check for accidents, as a stranger can edit both.
    """
    folder = user_path(folder)
    path, weights = folder / "model.json", folder / "weights.safetensors"
    if not path.exists():
        raise InputError(f"{folder} is no release: it has no model.json, as bam export writes it")
    facts = as_object(read_bytes(path, LARGEST_FACTS), path)
    for key, is_right in FACTS.items():
        if key not in facts:
            raise InputError(f"{path} has no {key!r}: it is damaged, or of an earlier version")
        if not is_right(facts[key]):
            raise InputError(f"{path} is damaged: {key} is {facts[key]!r:.200}")
    facts["classes"] = facts["classes"] or [str(k) for k in range(facts["num_classes"])]
    if len(facts["classes"]) != facts["num_classes"]:
        raise InputError(f"{path} is damaged: it has {len(facts['classes'])} names of classes")
    try:
        built = build(facts, own_model)
    except MissingExtraError:
        raise
    except Exception as error:  # whatever a network's layers raise of a stranger's options
        damaged = "" if isinstance(error, ValueError) else f"{path} is damaged: "
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"{damaged}{lines[0]}") from error
    # The network's parameters are counted, not made: the file must have as many.
    like = traverse_util.flatten_dict(built.like, sep="/")
    num_bytes = sum(math.prod(x.shape) * max(4, x.dtype.itemsize) for x in like.values())
    check_memory(num_bytes, f"the weights of {path}")
    content = read_bytes(weights, num_bytes + MIB + 2**10 * len(like))
    named = pretrained.tensors(content, weights)
    if facts["weights_sha256"] != hashlib.sha256(content).hexdigest():
        raise InputError(f"{weights} is damaged: it has not the SHA-256 that model.json says")
    named |= {x: named[x].astype(jnp.bfloat16) for x in facts["bfloat16"] if x in named}
    if named.keys() != like.keys():
        raise InputError(NOT_OF.format(folder))
    params = traverse_util.unflatten_dict(named, sep="/")
    check_shapes(folder, params, built.like)
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def logits(params: Params, images: Images) -> Float[Array, "n classes"]:
        return built.model.logits(params, built.prepare(images))

    return Released(params, logits, built.prepare, built.model, facts)


MIB = 2**20
LARGEST_FACTS = 2**26  # bytes of a `model.json`; the names of classes may be many
LARGEST_INPUT = 2**26  # numbers in an input: 4096 × 4096 in four channels
# Of an option, such as a width; and of a depth, whose layers are looked at one by one.
LARGEST_SIZE, LARGEST_DEPTH = 10_000, 512
LISTS = ("mean", "std", "size")  # of a backbone
NOT_OF = "the weights in {} are not those of the model it describes"


def _are_numbers(
    value: object, kinds: tuple[type, ...] = (int, float), above: float = -math.inf
) -> bool:
    return isinstance(value, list) and all(
        type(x) in kinds and abs(x) < 2**31 and x > above for x in value
    )


def _is_section(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    is_own = ":" in value["name"]  # of bam's parts only a backbone takes a list

    def is_option(key: str, x: object) -> bool:
        if isinstance(x, list):
            return (is_own or key in LISTS) and all(is_option(key, each) for each in x)
        most = LARGEST_DEPTH if key == "depth" else LARGEST_SIZE
        return isinstance(x, str | float) or (isinstance(x, int) and abs(x) <= most)

    return all(is_option(key, x) for key, x in value.items())


def _are_texts(kind: Any) -> Callable[[Any], bool]:
    """A test for values of a type, of texts alone."""
    return lambda value: type(value) is kind and all(isinstance(x, str) for x in value)


# What a `model.json` must have, and whether a stranger's is of the right type.
FACTS: Mapping[str, Callable[[Any], bool]] = {
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
    """A network made from its facts, without weights; `like` has their shapes."""

    model: models.Model
    prepare: Callable[[Images], Float[Array, "... k"]]
    like: Shapes


def build(facts: JsonObject, own_model: str) -> Built:
    """The network that a `model.json` describes; `own_model` as of `load`."""
    shape, section = tuple(facts["image_shape"]), ConfigDict(facts["model"])
    if ":" in section.name and section.name != own_model:
        raise InputError(
            f"the model is {section.name}, code that is not bam's: if you trust it, say so with "
            f"--own_model={section.name} (in Python: own_model)"
        )
    module = parts.make_model(section, facts["num_classes"])
    # As the run's own evaluation: outside of per-example gradients XLA's convolution is fastest.
    model = models.as_functions(module, shape, convolution="xla", precision=facts["precision"])
    none = datasets.Split(np.zeros((0, *shape), np.uint8), np.zeros(0, np.int32))
    mean, std = (np.asarray(facts[key], np.float32) for key in ("mean", "std"))
    dataset = datasets.Dataset("", none, none, facts["num_classes"], mean, std)

    section = facts.get("features") or {"name": ""}
    if not _is_section(section):
        raise TypeError(f"features is {section!r}")
    if section["name"] == "prior":
        section = {"digest": "none named", **section}
    elsewhere = ":" in section["name"] or section["name"] == "backbone"  # not in the release
    feature_map = None if elsewhere else parts.make_features(ConfigDict(section))

    def prepare(images: Images) -> Float[Array, "... k"]:
        if feature_map is not None:
            images = extraction.to_features(feature_map, images)
        return datasets.prepare(dataset, images, facts["input_clip_norm"])

    return Built(model, prepare, jax.eval_shape(model.init, jax.random.key(0)))


def check_shapes(where: Path, params: PyTree, like: Shapes) -> None:
    """InputError for weights that are not of a network's shapes."""
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), tree)  # noqa: E731
    if shapes(params) != shapes(like):
        raise InputError(NOT_OF.format(where))
