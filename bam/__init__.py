"""Bias-Aware Minimisation and its neighbours: differentially private training in JAX.

One example's gradient comes from an *oracle* (`dp_sgd`, `dp_sat`, `bam_sam`, `bam_exact`), is
bounded by an optax *transform* (`clip_by_l2_norm`, `normalize`, `clip_per_layer`), summed by the
*engine* (`clipped_sum`), which adds the noise (`gaussian_noise`); `privatize` is all of that in one
transform, for batches that fit in memory. `epsilon` and `noise_multiplier` say what it costs.
`PrivateTraining` couples sampler, clip, noise and ε, so that they cannot disagree: begin there.
"""

from bam.core import compiler, sampling, strategy  # noqa: F401 (compiler: before JAX computes)
from bam.core.chacha import secret_key, seeded_key
from bam.core.clipping import (
    BoundedTransformation,
    chain,
    clip_by_l2_norm,
    clip_per_layer,
    normalize,
)
from bam.core.engine import clipped_sum
from bam.core.fixed_point import GaussianNoise
from bam.core.noise import gaussian_noise
from bam.core.oracles import Oracle, bam_exact, bam_sam, dp_sat, dp_sgd
from bam.core.privatize import privatize
from bam.errors import InputError
from bam.privacy.accounting import epsilon, noise_multiplier
from bam.privacy.plan import PrivacyPlan, make_plan
from bam.privacy.private_training import DrawnBatch, PrivateTraining

__version__ = "0.2.0"

__all__ = [
    "BoundedTransformation",
    "DrawnBatch",
    "GaussianNoise",
    "InputError",
    "Oracle",
    "PrivacyPlan",
    "PrivateTraining",
    "bam_exact",
    "bam_sam",
    "chain",
    "clip_by_l2_norm",
    "clip_per_layer",
    "clipped_sum",
    "dp_sat",
    "dp_sgd",
    "epsilon",
    "gaussian_noise",
    "make_plan",
    "noise_multiplier",
    "normalize",
    "privatize",
    "sampling",
    "secret_key",
    "seeded_key",
    "strategy",
]


def __getattr__(name: str) -> object:
    """`bam.as_functions`, of `bam.models`, which needs Flax: imported when it is asked for."""
    if name != "as_functions":
        raise AttributeError(f"module 'bam' has no attribute {name!r}")
    from bam.models import as_functions

    return as_functions
