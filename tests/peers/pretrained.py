"""Logits of timm's and transformers' networks, for weights that a test can make again.

python tests/peers/pretrained.py    (in an environment with torch, timm and transformers)

Writes pretrained.json beside it: of each network its parameters' names and shapes, and logits of
two images of 64 × 64. Weights are `weights_of`, by NumPy, so that no weights are kept.
"""

import json
import zlib
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")


def weights_of(shapes):
    """Weights like those of a trained network in size: near one for scales, small otherwise."""
    made = {}
    for name, shape in shapes.items():
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        is_scale = len(shape) == 1 and name.endswith("weight")
        fan_in = np.prod(shape[1:]) if len(shape) > 1 else 100
        made[name] = (1 + drawn / 10 if is_scale else drawn / np.sqrt(fan_in)).astype(np.float32)
    return made


def images():
    """Two images, [2, 64, 64, 3]."""
    return np.random.default_rng(0).standard_normal((2, 64, 64, 3)).astype(np.float32)


def main():
    """Runs every network, writes their logits."""
    import timm
    import torch
    import transformers
    from timm.layers import GroupNorm

    of_vit = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768,
        image_size=64, patch_size=16, num_labels=5,
    )  # fmt: skip
    networks = {
        "vit_ti16 timm": timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5),
        "vit_ti16 transformers": transformers.ViTForImageClassification(of_vit),
        "resnet18 timm": timm.create_model("resnet18", norm_layer=GroupNorm, num_classes=5),
        "resnet50 timm": timm.create_model("resnet50_gn", num_classes=5),
    }
    versions = {x.__name__: x.__version__ for x in (torch, timm, transformers)}
    found = {"versions": versions, "networks": {}}
    for name, network in networks.items():
        shapes = {k: list(v.shape) for k, v in network.state_dict().items()}
        network.load_state_dict({k: torch.tensor(v) for k, v in weights_of(shapes).items()})
        network.eval()
        with torch.no_grad():
            logits = network(torch.tensor(images().transpose(0, 3, 1, 2)))
        logits = getattr(logits, "logits", logits)
        found["networks"][name] = {"shapes": shapes, "logits": logits.double().tolist()}
        print(name, len(shapes), logits[0, :3])
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
