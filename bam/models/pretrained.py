"""Weights of timm and Hugging Face transformers under the names, and in the layouts, used here.

Both libraries are PyTorch's: a linear layer's weight is `[out, in]` there, a convolution's
`[out, in, h, w]`.
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

with needs("train"):
    import safetensors
    import safetensors.numpy

# Name in a file -> name here; the first pattern that matches the whole name counts. Transformers
# has three attention matrices where there is one here; the last word says which one it is.
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
# A name that only this kind of file has -> the patterns of its names.
KINDS = {
    r"blocks\.0\.attn\.qkv\.weight": VIT_TIMM,
    r"(vit\.)?embeddings\.cls_token": VIT_TRANSFORMERS,
    r"layer1\.0\.conv1\.weight": RESNET_TIMM,
}
QUERY_KEY_VALUE = ("q", "k", "v")
# safetensors' names of types; JAX brings bfloat16 to NumPy.
TYPES: Mapping[str, Any] = {
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"{x.upper()}{8 * size}": np.dtype(f"{x}{size}") for x in "iu" for size in (1, 2, 4, 8)},
    **{"BOOL": np.dtype(bool), "C64": np.dtype(np.complex64), "BF16": jnp.bfloat16},
}
# Beginning of other files that users take for weights -> their kind, and the remedy.
OTHERS = {
    rb"version https://git-lfs": "a pointer of Git LFS: run `git lfs pull`, or download the file",
    rb"\s*<(!doctype|html|\?xml)": "a web page: download the file itself",
    rb"PK": "a zip file, as PyTorch or NumPy write it: save it as safetensors",
    rb"\x80[\x02-\x05]": "a pickle, as PyTorch writes it: save it as safetensors",
    rb"\x89HDF": "an HDF5 file: save it as safetensors",
    rb"\Z": "empty",
}


def tensors(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """The weights in the bytes of a safetensors file; InputError, in one line, for another file."""
    try:
        stored = safetensors.deserialize(content)
    except Exception as error:  # for a damaged file it raises its own error, TypeError and others
        # Asked last, because the length of a header may look like the beginning of another file.
        for beginning, what in OTHERS.items():
            if re.match(beginning, content, re.IGNORECASE):
                raise InputError(f"{path} is no safetensors file but {what}") from None
        raise InputError(
            f"{path} is damaged, cut short or no safetensors file: download it again ({error})"
        ) from None
    if kind := next((x["dtype"] for _, x in stored if x["dtype"] not in TYPES), ""):
        raise InputError(
            f"{path} is no safetensors file of NumPy's types: save its weights of {kind} as F32"
        )
    return {k: np.frombuffer(x["data"], TYPES[x["dtype"]]).reshape(x["shape"]) for k, x in stored}


def fitted(
    named: Mapping[str, np.ndarray], needed: Mapping[str, Any], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Weights adapted to images of another size or to grey ones, as in timm, and to float32.

    A ViT's positions on a square grid are interpolated, bicubic (a = -1/2) with antialiasing; the
    class token keeps its position. The first layer's weights are summed over the colours, so a grey
    image has the same outputs as three equal channels had.

    Args:
      named: as `renamed` returns them. Weights that do not fit are left as they are, and `load`
        refuses them.
      needed: name -> array or shape, of the model.
      shape: of the images; height and width decide the grid of patches.
    """
    weights = dict(named)
    for name in named.keys() & needed.keys():
        value, like = weights[name], needed[name]
        if value.ndim != len(like.shape):
            continue
        if value.dtype in (np.float16, jnp.bfloat16) and like.dtype == np.float32:
            value = value.astype(np.float32)
        if name == "position" and value.shape[::2] == like.shape[::2]:
            value = _interpolated(value, like.shape[1] - 1, *(shape[:2] or (1, 1)))
        if name == "stem/conv/kernel" and (value.shape[2], like.shape[2]) == (3, 1):
            value = value.sum(axis=2, keepdims=True)
        if name == "patch/kernel" and len(value) == 3 * like.shape[0]:
            value = value.reshape(-1, 3, value.shape[-1]).sum(axis=1)
        weights[name] = value
    return weights


def _interpolated(position: np.ndarray, num_patches: int, height: int, width: int) -> np.ndarray:
    """Positions `[1, 1 + side², d]` on another image's grid; unchanged if they are no such grid."""
    side = math.isqrt(max(0, position.shape[1] - 1))
    rows = max(1, round(math.sqrt(num_patches * height / width)))
    is_square, is_grid = 0 < side**2 == position.shape[1] - 1, num_patches % rows == 0
    if num_patches == side**2 or not (is_square and is_grid):
        return position
    features = position.shape[-1]
    grid = position[0, 1:].reshape(side, side, features)
    resized = jax.image.resize(grid, (rows, num_patches // rows, features), "cubic")
    return np.concatenate([position[:, :1], np.asarray(resized).reshape(1, -1, features)], axis=1)


def renamed(named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights as a model here has them, if their names are another library's; else as they are.

    Names that no pattern has are left alone: whoever loads them says that they are too many.

    Raises:
      InputError: for weights of a model with BatchNorm, with what takes its place.

    Examples:
      >>> new = renamed({"layer1.0.conv1.weight": np.zeros((8, 4, 3, 3)), "fc.bias": np.ones(2)})
      >>> {name: x.shape for name, x in new.items()}
      {'layer1_0_1/conv/kernel': (3, 3, 4, 8), 'head/bias': (2,)}
    """
    patterns = next(
        (of for mark, of in KINDS.items() if any(re.fullmatch(mark, x) for x in named)), None
    )
    if any(name.endswith("running_mean") for name in named):
        raise InputError(
            "these weights are of a model with BatchNorm, which mixes the examples of a batch: "
            "take ones that were trained with GroupNorm, such as timm's resnet50_gn"
        )
    if patterns is None:
        return dict(named)
    weights: dict[str, np.ndarray] = {}
    apart: dict[str, dict[str, np.ndarray]] = {}
    for name, value in named.items():
        path, _, which = _path_of(name, patterns).partition(" ")
        path, value = _laid_out(path, value)
        if which:
            apart.setdefault(path, {})[which[0]] = value
        else:
            weights[path] = value
    for path, three in apart.items():
        if three.keys() == set(QUERY_KEY_VALUE):
            weights[path] = np.concatenate([three[x] for x in QUERY_KEY_VALUE], axis=-1)
    return weights


def _path_of(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, path in patterns.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(path)
    return name


def _laid_out(path: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """A PyTorch weight as Flax has it: a matrix of inputs by outputs, a scale of a norm."""
    if not path.endswith("/weight"):
        return path, value
    path = path.removesuffix("weight")
    if value.ndim == 1:
        return path + "scale", value
    value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
    if path == "patch/":  # a product with each patch's pixels in one row
        value = value.reshape(-1, value.shape[-1])
    return path + "kernel", np.ascontiguousarray(value)
