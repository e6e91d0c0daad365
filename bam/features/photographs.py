"""Crops of the two public photographs in scikit-learn, as a sample of natural images.

Statistics of them cost no privacy, unlike statistics of private images.
"""

import numpy as np
from jaxtyping import Float32

from bam.data.common import DataError
from bam.extras import needs

SHRUNK = (3, 4, 6, 8)  # factors; a crop of a shrunk photograph shows objects, as small images do


def crops(size: int = 32, channels: int = 3) -> Float32[np.ndarray, "n size size channels"]:
    """Returns square crops of the photographs at several scales, with pixels in [0, 1].

    The crops are always the same. Neighbours overlap by half. With one channel the crops are grey.
    """
    if channels not in (1, 3):
        raise DataError(f"photographs have 3 channels, or 1 when grey, not {channels}")
    with needs("train"):
        from sklearn import datasets
    squares = []
    for photograph in datasets.load_sample_images().images:
        pixels = photograph.astype(np.float64) / 255
        if channels == 1:
            pixels = pixels.mean(axis=-1, keepdims=True)
        for factor in SHRUNK:
            height, width = (side // factor for side in pixels.shape[:2])
            even = pixels[: height * factor, : width * factor]  # sides are multiples of the factor
            small = even.reshape(height, factor, width, factor, channels).mean(axis=(1, 3))
            squares += [
                small[top : top + size, left : left + size]
                for top in range(0, height - size + 1, size // 2)
                for left in range(0, width - size + 1, size // 2)
            ]
    return np.stack(squares).astype(np.float32)
