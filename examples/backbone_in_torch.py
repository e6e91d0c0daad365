"""The features "backbone" of a release in PyTorch, without bam and JAX.

The weights are the file that the release was trained with, by bam, timm or transformers:

    features = backbone_in_torch.load("release", "model.safetensors")
    logits = load_in_torch.load("release", features)(images)
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import load_in_torch
import safetensors.torch
import torch
from torch.nn import functional

Weights = Mapping[str, torch.Tensor]
RESIZING = {"nearest": "nearest-exact", "bilinear": "bilinear", "bicubic": "bicubic"}
# A pattern of names by timm or transformers -> a release's name. Of three attention matrices, a
# last letter says which it is.
LAYER = r"(?:vit\.)?(?:encoder\.)?layers?\.(\d+)\."
NAMES = {
    r"cls_token|(?:vit\.)?embeddings\.cls_token": "class_token",
    r"pos_embed|(?:vit\.)?embeddings\.position_embeddings": "position",
    r"patch_embed\.proj\.(\w+)": r"patch/\1",
    r"(?:vit\.)?embeddings\.patch_embeddings\.projection\.(\w+)": r"patch/\1",
    r"blocks\.(\d+)\.(?:attn\.|mlp\.|)(norm[12]|qkv|proj|fc[12])\.(\w+)": r"block_\1/\2/\3",
    LAYER + r"layernorm_before\.(\w+)": r"block_\1/norm1/\2",
    LAYER + r"layernorm_after\.(\w+)": r"block_\1/norm2/\2",
    LAYER
    + r"attention\.(?:attention\.)?(q|k|v)(?:uery|ey|alue|_proj)\.(\w+)": r"block_\1/qkv/\3 \2",
    LAYER + r"attention\.(?:output\.dense|o_proj)\.(\w+)": r"block_\1/proj/\2",
    LAYER + r"(?:intermediate\.dense|mlp\.fc1)\.(\w+)": r"block_\1/fc1/\2",
    LAYER + r"(?:output\.dense|mlp\.fc2)\.(\w+)": r"block_\1/fc2/\2",
    r"(?:vit\.layer|layer|)norm\.(\w+)": r"norm/\1",
    r"conv1\.(\w+)": r"stem/conv/\1",
    r"bn1\.(\w+)": r"stem/norm/\1",
    r"layer(\d)\.(\d+)\.conv(\d)\.(\w+)": r"layer\1_\2_\3/conv/\4",
    r"layer(\d)\.(\d+)\.bn(\d)\.(\w+)": r"layer\1_\2_\3/norm/\4",
    r"layer(\d)\.(\d+)\.downsample\.0\.(\w+)": r"layer\1_\2_skip/conv/\3",
    r"layer(\d)\.(\d+)\.downsample\.1\.(\w+)": r"layer\1_\2_skip/norm/\3",
}


def load(folder: str, weights: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The map of images `[n, height, width, channels]`, in [0, 1], to `[n, 1, 1, features]`."""
    content = Path(weights).read_bytes()
    stated = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))["features"]
    if stated.get("digest") != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{weights}: the SHA-256 is not that of the features in {folder}")
    if stated["interpolation"] not in RESIZING:
        raise ValueError(f"{folder}: PyTorch does not resize by {stated['interpolation']}")
    height, width = stated["size"]
    named = rename({name: x.float() for name, x in safetensors.torch.load(content).items()})
    network = resnet if "stem/conv/kernel" in named else load_in_torch.vision_transformer
    if network is not resnet:
        named["position"] = interpolate(named["position"], height // 16, width // 16)
    mean, std = torch.tensor(stated["mean"]), torch.tensor(stated["std"])
    mode = RESIZING[stated["interpolation"]]

    def features(images: torch.Tensor) -> torch.Tensor:
        planes = images.permute(0, 3, 1, 2)
        planes = functional.interpolate(planes, (height, width), mode=mode, antialias="b" in mode)
        pixels = planes.clamp(0, 1).expand(len(images), 3, height, width).permute(0, 2, 3, 1)
        return network(named, (pixels - mean) / std)[:, None, None]

    return features


def rename(arrays: Weights) -> dict[str, torch.Tensor]:
    """Returns weights with the names and layouts of a release, without a head."""
    weights: dict[str, torch.Tensor] = {}
    for name, x in arrays.items():
        matches = ((re.fullmatch(pattern, name), path) for pattern, path in NAMES.items())
        path = next((match.expand(path) for match, path in matches if match), name)
        path, _, part = path.partition(" ")
        if path.endswith("/weight"):
            path = path.removesuffix("weight") + ("scale" if x.ndim == 1 else "kernel")
            x = x.permute(2, 3, 1, 0) if x.ndim == 4 else x if x.ndim == 1 else x.T
            x = x.flatten(0, 2) if path == "patch/kernel" else x
        weights[f"{path} {part}".strip()] = x
    for path in [name.removesuffix(" q") for name in weights if name.endswith(" q")]:
        weights[path] = torch.cat([weights.pop(f"{path} {x}") for x in "qkv"], dim=-1)
    return {name: x for name, x in weights.items() if not re.match("head|fc|classifier", name)}


def interpolate(position: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Interpolates the positions of a square grid of patches on another grid.

    The class token keeps its own position.
    """
    side = math.isqrt(position.shape[1] - 1)
    if rows * columns == side**2:
        return position
    grid = position[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, (rows, columns), mode="bicubic", antialias=True)
    return torch.cat([position[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)


def resnet(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """A ResNet with GroupNorm: the mean over the pixels of its last stage."""

    def layer(name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        kernel = weights[f"{name}/conv/kernel"].permute(3, 2, 0, 1)
        scale, bias = (weights[f"{name}/norm/{part}"] for part in ("scale", "bias"))
        x = functional.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        return functional.group_norm(x, math.gcd(32, len(scale)), scale, bias)

    x = functional.relu(layer("stem", x.permute(0, 3, 1, 2), 2))
    x = functional.max_pool2d(x, 3, 2, padding=1)
    blocks = sorted(
        {
            tuple(map(int, m.groups()))
            for m in map(re.compile(r"layer(\d)_(\d+)_1/conv/kernel").fullmatch, weights)
            if m
        }
    )
    for stage, block in blocks:
        name, stride = f"layer{stage}_{block}", 2 if stage > 1 and not block else 1
        is_bottleneck = f"{name}_3/conv/kernel" in weights
        y = x
        for i in (1, 2, 3)[: 2 + is_bottleneck]:
            y = functional.relu(y) if i > 1 else y
            y = layer(f"{name}_{i}", y, stride if i == 1 + is_bottleneck else 1)
        if f"{name}_skip/conv/kernel" in weights:
            x = layer(f"{name}_skip", x, stride)
        x = functional.relu(x + y)
    return x.mean((2, 3))
