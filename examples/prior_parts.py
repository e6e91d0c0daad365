"""Features of drawn images from weights of your own, or from some of their parts.

    python -m scripts.prior --drawn=random_field --out=runs/fields.safetensors
    bam sweep --config=cifar10_prior --config.features.name=examples.prior_parts:features
      --set=features.weights=runs/fields.safetensors …

`parts` are joined by "+", as in "fine+scattering". The features themselves: `bam/data/prior.py`.
"""

import safetensors.numpy

from bam.data import prior
from bam.data.common import DataError
from bam.data.features import FeatureMap


def features(weights: str = "", parts: str = "+".join(prior.PARTS)) -> FeatureMap:
    """The map of these parts; "" weights are the package's."""
    chosen = parts.split("+")
    if unknown := set(chosen) - set(prior.PARTS):
        raise DataError(
            f"features.parts joins {', '.join(prior.PARTS)} by +, got {sorted(unknown)}"
        )
    return prior.with_weights(safetensors.numpy.load_file(weights or prior.FILE), chosen)
