"""A release in PyTorch, without bam and JAX, for `linear`, `convnet`, `vit_ti16` and `vit_s16`.

`load("release")(images)` returns logits. Prepare the images as `preprocessing` in model.json says.
For a release of features, also pass the map of `prior_in_torch.py` or `backbone_in_torch.py`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch.nn import functional

Weights = Mapping[str, torch.Tensor]
Map = Callable[[torch.Tensor], torch.Tensor]


def load(folder: str, feature_map: Map | None = None) -> Map:
    """A release as a function from images `[n, height, width, channels]` to logits.

    Images are pixels, uint8, or floats if those of the run were floats.
    """
    model = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))
    content = Path(folder, "weights.safetensors").read_bytes()
    if model["weights_sha256"] != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{folder}: the SHA-256 of the weights is not that in model.json")
    weights = safetensors.torch.load(content)
    name, bound = model["model"]["name"], model["input_clip_norm"]
    if name not in NETWORKS or model["precision"] != "float32":
        raise ValueError(f"{name}: this reads {', '.join(NETWORKS)} in float32")
    if bool(features := model["features"].get("name")) != bool(feature_map):
        raise ValueError(f"{folder} is of {features or 'no'} features: give their map")
    mean, std = torch.tensor(model["mean"]), torch.tensor(model["std"])
    are_pixels = model.get("raw_dtype", "uint8") == "uint8"

    def logits(images: torch.Tensor) -> torch.Tensor:
        if are_pixels != (images.dtype == torch.uint8):
            raise TypeError(f"images are {images.dtype}: this takes {model['raw_dtype']}")
        x = images.float() / (255 if are_pixels else 1)
        if feature_map:
            x = feature_map(x).half().float()  # the run kept its features as float16
        x = (x - mean) / std
        if bound:
            norms = x.flatten(1).norm(dim=1)
            x = x / (norms / bound).clamp(min=1).view(-1, 1, 1, 1)
        return NETWORKS[name](weights, x)

    return logits


def linear(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Logistic regression with a weight `[classes, inputs]`."""
    return functional.linear(x.flatten(1), weights["weight"], weights["bias"])


def convnet(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Two blocks of conv 3×3 → GroupNorm → ReLU → average pool, then linear."""
    x = x.permute(0, 3, 1, 2)
    for i in range(2):
        x = functional.conv2d(x, weights[f"Conv_{i}/kernel"].permute(3, 2, 0, 1), padding=1)
        scale, bias = (weights[f"GroupNorm_{i}/{name}"] for name in ("scale", "bias"))
        x = functional.group_norm(x, math.gcd(4, len(scale)), scale, bias, eps=1e-5)
        x = functional.avg_pool2d(functional.relu(x), 2)
    return dense(weights, "Dense_0", x.permute(0, 2, 3, 1).flatten(1))


def vision_transformer(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm before each layer, exact GELU, heads of 64 numbers, patches of 16 pixels."""
    n, height, width, channels = x.shape
    patches = x.reshape(n, height // 16, 16, width // 16, 16, channels).transpose(2, 3)
    x = dense(weights, "patch", patches.reshape(n, -1, 16 * 16 * channels))
    token = weights["class_token"].expand(n, -1, -1)
    x = torch.cat([token, x], dim=1) + weights["position"]
    for i in range(sum(name.endswith("qkv/kernel") for name in weights)):
        block = f"block_{i}/"
        qkv = dense(weights, block + "qkv", layer_norm(weights, block + "norm1", x))
        q, k, v = qkv.view(*x.shape[:2], 3, -1, 64).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + dense(weights, block + "proj", attended.reshape(x.shape))
        hidden = dense(weights, block + "fc1", layer_norm(weights, block + "norm2", x))
        x = x + dense(weights, block + "fc2", functional.gelu(hidden))
    x = layer_norm(weights, "norm", x)[:, 0]
    return dense(weights, "head", x) if "head/bias" in weights else x


def dense(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """A linear layer with a kernel `[inputs, outputs]`."""
    return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]


def layer_norm(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Normalises each token."""
    scale, bias = weights[f"{name}/scale"], weights[f"{name}/bias"]
    return functional.layer_norm(x, scale.shape, scale, bias, eps=1e-6)


NETWORKS = {
    "linear": linear,
    "convnet": convnet,
    "vit_ti16": vision_transformer,
    "vit_s16": vision_transformer,
}
