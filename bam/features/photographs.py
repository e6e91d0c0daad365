"""Two public photographs, which come inside scikit-learn: what natural images look like.

Statistics of them, unlike those of private images, cost no privacy.
"""

import numpy as np
from jaxtyping import Float32

from bam.data.common import DataError
from bam.extras import needs

SHRUNK = (3, 4, 6, 8)  # by these factors, so that a crop shows things, as a small image does


def crops(size: int = 32, channels: int = 3) -> Float32[np.ndarray, "n size size channels"]:
    """Square crops of the photographs at several scales, pixels in [0, 1]; always the same.

    Grey ones with one channel. Neighbours overlap by half.
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
            whole = pixels[: height * factor, : width * factor]
            small = whole.reshape(height, factor, width, factor, channels).mean(axis=(1, 3))
            squares += [
                small[top : top + size, left : left + size]
                for top in range(0, height - size + 1, size // 2)
                for left in range(0, width - size + 1, size // 2)
            ]
    return np.stack(squares).astype(np.float32)
