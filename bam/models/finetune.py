"""Training that begins with weights from a file, for all parameters or for some.

Parameters have the names of a release, such as `Dense_0/kernel`. Parameters that are not trained
are frozen: they have no gradient, no noise and no optimizer state.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.core import pytree
from bam.core.oracles import LossFn
from bam.core.pytree import Params
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonMapping
from bam.models import lora, pretrained
from bam.text import short_list

with needs("train"):
    import safetensors.numpy
    from flax import traverse_util


LIMIT = 2**37  # most bytes of a file of weights
SHARD = r"-\d+-of-\d+\."  # in the name of a file with a part of a model's weights
JOIN = "join the files of all parts of these weights in one"


class Weights(NamedTuple):
    """Initial weights whose user states that they were trained without the private data.

    Attributes:
      arrays: name -> array, for the parameters that do not begin at random.
      digest: SHA-256 of the file, in hexadecimal digits; "" without a file.
      size: height and width of the images that a ViT's positions in the file are for, or None.
    """

    arrays: Mapping[str, np.ndarray]
    digest: str
    size: tuple[int, int] | None = None


def split(params: PyTree, trainable: str) -> tuple[PyTree, PyTree]:
    """Splits parameters into `(trained, frozen)` by an expression that matches trained names.

    "" trains all. InputError for an invalid regular expression, or one that matches no name.

    Examples:
      >>> split({"Conv_0": {"kernel": 1.0}, "Dense_0": {"bias": 2.0}}, "Dense")
      ({'Dense_0': {'bias': 2.0}}, {'Conv_0': {'kernel': 1.0}})
    """
    if not trainable:
        return params, {}
    leaves = traverse_util.flatten_dict(params, sep="/")
    matching = _match("trainable", trainable, leaves)
    trained, frozen = (
        {name: x for name, x in leaves.items() if (name in matching) == is_trained}
        for is_trained in (True, False)
    )
    return traverse_util.unflatten_dict(trained, "/"), traverse_util.unflatten_dict(frozen, "/")


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns the parameters of the model, from the two parts that `split` returns.

    Examples:
      >>> merge({"Dense_0": {"bias": 2.0}}, {"Dense_0": {"kernel": 1.0}})
      {'Dense_0': {'bias': 2.0, 'kernel': 1.0}}
    """
    if not frozen:
        return trained
    trained, frozen = (traverse_util.flatten_dict(x, sep="/") for x in (trained, frozen))
    return traverse_util.unflatten_dict(trained | frozen, sep="/")


def with_frozen(loss: LossFn, frozen: PyTree) -> LossFn:
    """Returns the loss of a model as a function of its trained parameters only."""
    return lambda trained, example: loss(merge(trained, frozen), example)


def load(init_from: str, init_fresh: str, like: PyTree, shape: tuple[int, ...] = ()) -> Weights:
    """Returns the weights in the file `init_from`, with the names and shapes of a model.

    Args:
      init_from: a safetensors file with the names of this library, of timm or of transformers
        (`bam.models.pretrained`), or a folder with a `weights.safetensors`, such as a release. ""
        gives no weights, so all parameters begin at random.
      init_fresh: a regular expression; parameters whose name matches begin at random.
      like: the model's parameters, or their shapes.
      shape: shape of the images, height and width first, for `pretrained.adapt`; () for squares.

    Raises:
      InputError: for another kind of file, missing or surplus names, other shapes or types, and
        values that are not finite.
      OSError: if the file cannot be read.
    """
    if not init_from:
        if init_fresh:
            raise InputError("--config.init_fresh needs --config.init_from=FILE")
        return Weights({}, "")
    path = file_of(init_from)
    _check_exists(path, init_from)
    content = files.read_bytes(path, LIMIT)
    arrays = pretrained.renamed(pretrained.tensors(content, path))
    needed = traverse_util.flatten_dict(like, sep="/")
    if not any(name.startswith(f"{lora.NAME}/") for name in arrays):  # LoRA then begins at random
        needed = {k: x for k, x in needed.items() if not k.startswith(f"{lora.NAME}/")}
    if init_fresh:
        fresh = _match("init_fresh", init_fresh, needed) | _match("", init_fresh, arrays)
        needed, arrays = ({k: x for k, x in d.items() if k not in fresh} for d in (needed, arrays))
    size = pretrained.size_of(arrays)
    arrays = pretrained.adapt(arrays, needed, shape)
    common = sorted(needed.keys() & arrays.keys())
    kind = lambda x: f"{np.dtype(x.dtype).name}{list(x.shape)}"  # noqa: E731
    lacking, surplus = needed.keys() - arrays.keys(), arrays.keys() - needed.keys()
    others = [name for name in common if kind(arrays[name]) != kind(needed[name])]
    if lacking and surplus:
        remedy = (
            "give weights of this model, because init_fresh would begin trained layers at random"
        )
        remedy = JOIN if re.search(SHARD, path.name) else remedy
        raise InputError(
            f"{path} lacks {_in_line(lacking)}, and has {_in_line(surplus)} instead: {remedy}"
        )
    if lacking:
        if re.search(SHARD, path.name):
            raise InputError(f"{path} lacks {_in_line(lacking)}: {JOIN}")
        raise InputError(
            f"{path} lacks {_in_line(lacking)}: to initialise them at random add "
            f"--config.init_fresh={_pattern_of(lacking)}"
        )
    if surplus:
        raise InputError(
            f"{path} has parameters that the model lacks: {_in_line(surplus)}: give weights of "
            f"this model, or leave these out by --config.init_fresh={_pattern_of(surplus)}"
        )
    if others:
        kinds = [f"{x} {kind(arrays[x])}, not {kind(needed[x])}" for x in others]
        raise InputError(
            f"{path} has other shapes or types than the model: {_in_line(kinds)}: if it is the "
            "layer for other classes, initialise it at random by "
            f"--config.init_fresh={_pattern_of(others)}"
        )
    if wrong := [x for x in common if not np.all(np.isfinite(arrays[x]))]:
        raise InputError(f"{path} has NaN or infinity in {_in_line(wrong)}")
    return Weights(arrays, _sha256(content), size)


def digest(weights: str | None) -> str:
    """Returns SHA-256 of a file of weights, or "" without one."""
    return _sha256(files.read_bytes(file_of(weights), LIMIT)) if weights else ""


def begin(params: Params, weights: Weights) -> Params:
    """Returns a model's random parameters, where copies of `weights` replace their namesakes."""
    initial = {name: jnp.array(x) for name, x in weights.arrays.items()}
    return merge(params, traverse_util.unflatten_dict(initial, sep="/"))


def save(params: PyTree, path: Path) -> None:
    """Writes weights into a safetensors file that `init_from` takes.

    Use it for models trained on public data. `bam.release` releases the weights of a private run.
    """
    leaves = traverse_util.flatten_dict(params, sep="/")
    files.write_bytes(path, safetensors.numpy.save({k: np.asarray(x) for k, x in leaves.items()}))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_of(weights: str) -> Path:
    """Returns the weights file of a path: the path itself, or the file in a release's folder."""
    path = files.user_path(weights)
    return path / "weights.safetensors" if path.is_dir() else path


def _match(key: str, pattern: str, leaves: JsonMapping) -> set[str]:
    """Returns the names that match a regular expression.

    InputError if a config's `key` matches none.
    """
    names = {name for name, matches in pytree.name_mask(pattern)(dict(leaves)).items() if matches}
    if key and not names:
        names_of_model = _in_line(leaves, 8)
        raise InputError(f"--config.{key}={pattern} matches no parameter of {names_of_model}")
    return names


def _check_exists(path: Path, given: str) -> None:
    """Raises FileNotFoundError if there is no file of weights, and names a likely one."""
    if path.exists():
        return
    folder = files.user_path(given)
    if beside := sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        raise FileNotFoundError(f"{folder} has no {path.name}: give the file, as {beside[0]}")
    raise FileNotFoundError(
        f"{path}: no such file: give a .safetensors file of this machine, because names of a hub "
        "are not downloaded"
    )


def _pattern_of(names: Collection[str]) -> str:
    """Returns a regular expression for the layers of these parameters, up to three of them."""
    layers = sorted({name.rpartition("/")[0] or name for name in names})
    if len(layers) > 3:
        return "REGEX"
    return f"'^({'|'.join(layers)})'" if layers[1:] else f"^{layers[0]}"


def _in_line(names: Collection[str], most: int = 3) -> str:
    """Returns the first names in order, and the number of the others."""
    return short_list(sorted(names), most)
