"""The features "prior" of a release in PyTorch, without bam and JAX.

The weights are `bam/features/prior.safetensors` of the version of bam that trained the release:

    features = prior_in_torch.load("release", "prior.safetensors")
    logits = load_in_torch.load("release", features)(images)
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch.nn import functional

Weights = Mapping[str, torch.Tensor]
SIDE, PATCH, FLOOR, THRESHOLD, LENGTH = 32, 6, 10 / 255**2, 1.5, 10.0
LAYERS = {1: 2, 3: 2, 4: 2, 5: 2, 7: 4}  # the network's normalisations, and their places a side
SHARES = dict.fromkeys(("fine", "coarse", "scattering"), 0.25)
NETWORK = [f"GroupNorm_{k}" for k in LAYERS]
SHARES |= dict.fromkeys(NETWORK, 0.05)
ANGLES, BORDER, STRIDE, MOVE = 8, 4, 2, 2


def load(folder: str, weights: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The map of images `[n, height, width, channels]`, in [0, 1], to `[n, 1, 1, features]`."""
    content = Path(weights).read_bytes()
    stated = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))["features"]
    if stated.get("digest") != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{weights}: the SHA-256 is not that of the features in {folder}")
    named = {name: x.float() for name, x in safetensors.torch.load(content).items()}
    return lambda images: features(named, images)


def features(weights: Weights, images: torch.Tensor) -> torch.Tensor:
    """Each part is whitened and scaled to its share; then large variances of all are reduced."""
    channels, rows = images.shape[-1], []
    pixels = functional.interpolate(
        images.permute(0, 3, 1, 2), (SIDE, SIDE), mode="bilinear", antialias=True
    )
    wide = functional.pad(pixels, (MOVE,) * 4, mode="reflect")
    both = [map_views(weights, image) for image in (wide, wide.flip(3))]
    for part, share in SHARES.items():
        planes = sum(each[part] for each in both) / 2
        planes = planes if part in NETWORK else planes.clamp(min=0).sqrt()
        places = planes.flatten(2).transpose(1, 2)
        centre, matrix = (weights[f"{channels}/{part}/{name}"] for name in ("centre", "matrix"))
        row = ((places - centre) @ matrix).flatten(1)
        row = functional.layer_norm(row, row.shape[1:], eps=1e-5)
        rows.append(row * LENGTH * (share / row.shape[1]) ** 0.5)
    centre, directions = (weights[f"{channels}/all/{name}"] for name in ("centre", "directions"))
    x = torch.cat(rows, dim=1) - centre
    x = x - (x @ directions.T) @ directions
    return (x * LENGTH / (x.norm(dim=1, keepdim=True) + 1e-6))[:, None, None]


def map_views(weights: Weights, wide: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each part's means over the views that images, wider by `MOVE`, have in their corners."""
    n, channels = wide.shape[:2]
    parts = {"scattering": means_of_views(scattering(wide), SIDE // 2, 4)}
    for part, pixels in (("fine", wide), ("coarse", squares(wide, SIDE // 2 + MOVE))):
        filters = (weights[f"{channels}/{part}/{name}"] for name in ("mean", "projection"))
        view = pixels.shape[-1] * SIDE // (SIDE + 2 * MOVE) - PATCH + 1
        parts[part] = means_of_views(responses(pixels, *filters), view, 2)
    views = torch.cat([wide[:, :, :SIDE, :SIDE], wide[:, :, -SIDE:, :SIDE]])
    layers = activations(weights, views.expand(2 * n, 3, SIDE, SIDE) - 0.5)
    return parts | {name: (x[:n] + x[n:]) / 2 for name, x in layers.items()}


def means_of_views(planes: torch.Tensor, view: int, num: int) -> torch.Tensor:
    """Means over each of `num`² squares of a view, averaged over the views in the corners."""
    side = planes.shape[-1]
    weights, edges = torch.zeros(num, side), [view * k // num for k in range(num + 1)]
    for first in (0, side - view):
        for row, low, high in zip(weights, edges, edges[1:], strict=False):
            row[first + low : first + high] += 0.5 / (high - low)
    return weights @ planes @ weights.T


def squares(planes: torch.Tensor, side: int) -> torch.Tensor:
    """Means over each of `side`² equal squares."""
    return functional.avg_pool2d(planes, planes.shape[-1] // side)


def responses(image: torch.Tensor, mean: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Responses of filters on normalised patches, `[n, filters, h, w]`."""
    columns = functional.unfold(image, PATCH).unflatten(1, (image.shape[1], PATCH**2))
    rows = columns.permute(0, 3, 2, 1).flatten(2)  # of a patch: rows, columns, channels
    rows = functional.layer_norm(rows, rows.shape[2:], eps=FLOOR)
    above = functional.relu((rows - mean) @ filters - THRESHOLD)
    return above.transpose(1, 2).unflatten(2, (image.shape[-1] - PATCH + 1, -1))


def activations(weights: Weights, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Means of a ResNet-9's layers over places, and over left and right."""
    means, skip = {}, x
    for k in range(8):
        kernel = weights[f"network/Conv_{k}/kernel"].permute(3, 2, 0, 1)
        scale, bias = (weights[f"network/GroupNorm_{k}/{name}"] for name in ("scale", "bias"))
        x = functional.conv2d(x, kernel, padding=1)
        x = functional.mish(functional.group_norm(x, math.gcd(32, len(scale)), scale, bias))
        if side := LAYERS.get(k):
            planes = squares(x, side)
            means[f"GroupNorm_{k}"] = (planes + planes.flip(3))[..., : side // 2] / 2
        x = x + skip if k in (3, 7) else functional.avg_pool2d(x, 2) if k in (1, 4, 5) else x
        skip = x if k in (1, 5) else skip
    return means


def scattering(images: torch.Tensor) -> torch.Tensor:
    """The wavelet scattering transform of order 2, `[n, c, h, w] -> [n, 81 c, h / 2, w / 2]`."""
    n, _, height, width = images.shape
    padded = functional.pad(images, (BORDER,) * 4, mode="reflect").flatten(0, 1)
    fine, coarse = (wavelets(*padded.shape[1:], scale) for scale in range(2))
    spectrum = torch.fft.fft2(padded)[:, None]
    first = torch.fft.ifft2(spectrum * fine).abs()
    first_coarse = torch.fft.ifft2(fold(spectrum * coarse)).abs()
    second = torch.fft.ifft2(fold(torch.fft.fft2(first)[:, :, None] * coarse)).abs().flatten(1, 2)
    smooth = []
    for planes in (padded[:, None], first, first_coarse, second):
        step = (height + 2 * BORDER) // planes.shape[-2]
        rows, columns = (gaussian(side, step) for side in (height, width))
        smooth.append(rows @ planes @ columns.T)
    return torch.cat(smooth, dim=1).reshape(n, -1, height // STRIDE, width // STRIDE)


def fold(spectrum: torch.Tensor) -> torch.Tensor:
    """The spectrum of every second pixel of an image."""
    height, width = spectrum.shape[-2:]
    return spectrum.unflatten(-1, (2, width // 2)).unflatten(-3, (2, height // 2)).mean((-4, -2))


def gaussian(side: int, step: int) -> torch.Tensor:
    """Weights of a periodic Gaussian around every second pixel of an image with its padding."""
    padded, sigma = side + 2 * BORDER, 1.6
    distance = BORDER + np.arange(0, side, STRIDE)[:, None] - np.arange(0, padded, step)
    shifts = padded * np.arange(-2, 3)[:, None, None]
    weights = np.exp(-((distance + shifts) ** 2) / (2 * sigma**2)).sum(0)
    return torch.tensor(step * weights / np.sqrt(2 * np.pi) / sigma, dtype=torch.float32)


def wavelets(height: int, width: int, scale: int) -> torch.Tensor:
    """The real spectra `[angles, h, w]` of Morlet wavelets: waves under a Gaussian, with mean 0."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / ANGLES
    periods, spectra = np.arange(-2, 3)[:, None], []
    y = (np.arange(height) + height * periods)[:, None, :, None]
    x = (np.arange(width) + width * periods)[None, :, None, :]
    for angle in (ANGLES // 2 - 1 - np.arange(ANGLES)) * np.pi / ANGLES:
        along = y * np.cos(angle) + x * np.sin(angle)
        across = x * np.cos(angle) - y * np.sin(angle)
        bell = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
        wave = (bell * np.exp(1j * frequency * along)).sum((0, 1))
        bell = bell.sum((0, 1))
        morlet = (wave - wave.sum() / bell.sum() * bell) * slant / (2 * np.pi * sigma**2)
        spectra.append(np.fft.fft2(morlet).real)
    return torch.tensor(np.stack(spectra), dtype=torch.float32)
