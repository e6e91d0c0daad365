"""Converts weights of timm and Hugging Face transformers to the names and layouts of `bam`.

Both libraries use PyTorch, where the weight of a linear layer is `[out, in]` and that of a
convolution `[out, in, h, w]`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bam.errors import InputError
from bam.extras import needs
from bam.models.vision_transformer import PATCH

with needs("train"):
    import safetensors
    import safetensors.numpy

# Pattern of a name in a file -> name in `bam`; the first that matches the complete name counts.
# Transformers has three attention matrices in place of one; a last word then says which it is.
VIT_TIMM = {
    r"cls_token": "class_token",
    r"pos_embed": "position",
    r"patch_embed\.proj\.(\w+)": r"patch/\1",
    r"blocks\.(\d+)\.(norm[12])\.(\w+)": r"block_\1/\2/\3",
    r"blocks\.(\d+)\.attn\.(qkv|proj)\.(\w+)": r"block_\1/\2/\3",
    r"blocks\.(\d+)\.mlp\.(fc[12])\.(\w+)": r"block_\1/\2/\3",
    r"norm\.(\w+)": r"norm/\1",
    r"head\.(\w+)": r"head/\1",
}
_LAYER = r"(?:vit\.)?(?:encoder\.)?layers?\.(\d+)\."
VIT_TRANSFORMERS = {
    r"(?:vit\.)?embeddings\.cls_token": "class_token",
    r"(?:vit\.)?embeddings\.position_embeddings": "position",
    r"(?:vit\.)?embeddings\.patch_embeddings\.projection\.(\w+)": r"patch/\1",
    _LAYER + r"layernorm_before\.(\w+)": r"block_\1/norm1/\2",
    _LAYER + r"layernorm_after\.(\w+)": r"block_\1/norm2/\2",
    _LAYER + r"attention\.attention\.(query|key|value)\.(\w+)": r"block_\1/qkv/\3 \2",
    _LAYER + r"attention\.([qkv])_proj\.(\w+)": r"block_\1/qkv/\3 \2",
    _LAYER + r"attention\.(?:output\.dense|o_proj)\.(\w+)": r"block_\1/proj/\2",
    _LAYER + r"(?:intermediate\.dense|mlp\.fc1)\.(\w+)": r"block_\1/fc1/\2",
    _LAYER + r"(?:output\.dense|mlp\.fc2)\.(\w+)": r"block_\1/fc2/\2",
    r"(?:vit\.)?layernorm\.(\w+)": r"norm/\1",
    r"classifier\.(\w+)": r"head/\1",
}
RESNET_TIMM = {
    r"conv1\.(\w+)": r"stem/conv/\1",
    r"bn1\.(\w+)": r"stem/norm/\1",
    r"layer(\d)\.(\d+)\.conv(\d)\.(\w+)": r"layer\1_\2_\3/conv/\4",
    r"layer(\d)\.(\d+)\.bn(\d)\.(\w+)": r"layer\1_\2_\3/norm/\4",
    r"layer(\d)\.(\d+)\.downsample\.0\.(\w+)": r"layer\1_\2_skip/conv/\3",
    r"layer(\d)\.(\d+)\.downsample\.1\.(\w+)": r"layer\1_\2_skip/norm/\3",
    r"fc\.(\w+)": r"head/\1",
}
# Pattern of a name that only this kind of file has -> the patterns for all its names.
KINDS = {
    r"blocks\.0\.attn\.qkv\.weight": VIT_TIMM,
    r"(vit\.)?embeddings\.cls_token": VIT_TRANSFORMERS,
    r"layer1\.0\.conv1\.weight": RESNET_TIMM,
}
QUERY_KEY_VALUE = ("q", "k", "v")
# Name of a type in safetensors -> NumPy's type; JAX adds bfloat16 to NumPy.
TYPES: Mapping[str, Any] = {
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"{x.upper()}{8 * size}": np.dtype(f"{x}{size}") for x in "iu" for size in (1, 2, 4, 8)},
    **{"BOOL": np.dtype(bool), "C64": np.dtype(np.complex64), "BF16": jnp.bfloat16},
}
# First bytes of other files that users take for weights -> the kind of file and a remedy.
OTHERS = {
    rb"version https://git-lfs": "a pointer of Git LFS: run `git lfs pull`, or download the file",
    rb"\s*<(!doctype|html|\?xml)": "a web page: download the file itself",
    rb"PK": "a zip file, as PyTorch or NumPy write it: save it as safetensors",
    rb"\x80[\x02-\x05]": "a pickle, as PyTorch writes it: save it as safetensors",
    rb"\x89HDF": "an HDF5 file: save it as safetensors",
    rb'\s*\{\s*"': "a JSON file: give the .safetensors file beside it",
    rb"\Z": "empty",
}


def tensors(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """Returns the weights in the bytes of a safetensors file.

    InputError for any other content.
    """
    try:
        stored = safetensors.deserialize(content)
    except Exception as error:  # safetensors raises its own error, TypeError and others
        # Not before: the header's length in a right file may look like the start of another kind.
        for beginning, kind in OTHERS.items():
            if re.match(beginning, content, re.IGNORECASE):
                raise InputError(f"{path} is not a safetensors file but {kind}") from None
        raise InputError(
            f"{path} is damaged, cut short or not a safetensors file: download it again ({error})"
        ) from None
    if dtype := next((x["dtype"] for _, x in stored if x["dtype"] not in TYPES), ""):
        raise InputError(
            f"{path} is not a safetensors file of NumPy's types: save its weights of {dtype} as F32"
        )
    return {k: np.frombuffer(x["data"], TYPES[x["dtype"]]).reshape(x["shape"]) for k, x in stored}


def adapt(
    arrays: Mapping[str, np.ndarray], needed: Mapping[str, Any], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Adapts weights to float32, and as in timm to images of another size or with one channel.

    The positions of a ViT on a square grid are interpolated (bicubic, a = -1/2, with antialiasing);
    the class token keeps its position. The weights of the first layer are summed over the colours,
    so a grey image has the outputs that it had with three equal channels.

    Args:
      arrays: weights as `renamed` returns them. Those that do not fit stay unchanged, and
        `finetune.load` refuses them.
      needed: name -> array or shape of a parameter of the model.
      shape: shape of the images; height and width decide the grid of patches.
    """
    weights = dict(arrays)
    for name in arrays.keys() & needed.keys():
        value, like = weights[name], needed[name]
        if value.ndim != len(like.shape):
            continue
        if value.dtype in (np.float16, jnp.bfloat16) and like.dtype == np.float32:
            value = value.astype(np.float32)
        if name == "position" and value.shape[::2] == like.shape[::2]:
            value = _interpolate(value, like.shape[1] - 1, *(shape[:2] or (1, 1)))
        if name == "stem/conv/kernel" and (value.shape[2], like.shape[2]) == (3, 1):
            value = value.sum(axis=2, keepdims=True)
        if name == "patch/kernel" and len(value) == 3 * like.shape[0]:
            value = value.reshape(-1, 3, value.shape[-1]).sum(axis=1)
        weights[name] = value
    return weights


def size_of(arrays: Mapping[str, np.ndarray]) -> tuple[int, int] | None:
    """Returns height and width of the images that the positions of a ViT are for.

    None for weights without positions, and for positions on another grid than a square.

    Examples:
      >>> size_of({"position": np.zeros((1, 1 + 14 * 14, 8))})
      (224, 224)
    """
    position = arrays.get("position")
    num_patches = 0 if position is None or position.ndim != 3 else position.shape[1] - 1
    side = math.isqrt(max(0, num_patches))
    return (side * PATCH, side * PATCH) if 0 < side**2 == num_patches else None


def _interpolate(position: np.ndarray, num_patches: int, height: int, width: int) -> np.ndarray:
    """Returns positions `[1, 1 + side², d]` on the grid of another size.

    Other shapes are unchanged.
    """
    side = math.isqrt(max(0, position.shape[1] - 1))
    rows = max(1, round(math.sqrt(num_patches * height / width)))
    is_square, is_grid = 0 < side**2 == position.shape[1] - 1, num_patches % rows == 0
    if num_patches == side**2 or not (is_square and is_grid):
        return position
    features = position.shape[-1]
    grid = position[0, 1:].reshape(side, side, features)
    resized = jax.image.resize(grid, (rows, num_patches // rows, features), "cubic")
    return np.concatenate([position[:, :1], np.asarray(resized).reshape(1, -1, features)], axis=1)


def renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames weights of another library, and gives them the layouts of `bam`.

    Names that match no pattern stay, and `finetune.load` refuses them as surplus.

    Raises:
      InputError: for weights of a model with BatchNorm; the message names a replacement.

    Examples:
      >>> new = renamed({"layer1.0.conv1.weight": np.zeros((8, 4, 3, 3)), "fc.bias": np.ones(2)})
      >>> {name: x.shape for name, x in new.items()}
      {'layer1_0_1/conv/kernel': (3, 3, 4, 8), 'head/bias': (2,)}
    """
    patterns = next(
        (of for mark, of in KINDS.items() if any(re.fullmatch(mark, x) for x in arrays)), None
    )
    if any(name.endswith("running_mean") for name in arrays):
        raise InputError(
            "these weights are of a model with BatchNorm, which mixes the examples of a batch: "
            "use weights that were trained with GroupNorm, such as timm's resnet50_gn"
        )
    if patterns is None:
        return dict(arrays)
    weights: dict[str, np.ndarray] = {}
    separate: dict[str, dict[str, np.ndarray]] = {}  # query, key and value of a layer
    for name, value in arrays.items():
        path, _, part = _path_of(name, patterns).partition(" ")
        path, value = _lay_out(path, value)
        if part:
            separate.setdefault(path, {})[part[0]] = value
        else:
            weights[path] = value
    for path, three in separate.items():
        if three.keys() == set(QUERY_KEY_VALUE):
            weights[path] = np.concatenate([three[x] for x in QUERY_KEY_VALUE], axis=-1)
    return weights


def _path_of(name: str, patterns: Mapping[str, str]) -> str:
    """Returns the name in `bam` of a weight, which stays if no pattern matches."""
    for pattern, path in patterns.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(path)
    return name


def _lay_out(path: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns a PyTorch weight with Flax's name and layout.

    It is a `kernel` `[…, in, out]` or a `scale`.
    """
    if not path.endswith("/weight"):
        return path, value
    path = path.removesuffix("weight")
    if value.ndim == 1:
        return path + "scale", value
    value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
    if path == "patch/":  # `VisionTransformer` multiplies the pixels of a patch in one row
        value = value.reshape(-1, value.shape[-1])
    return path + "kernel", np.ascontiguousarray(value)
