"""What `bam` exports, for type checkers and editors; `__init__.py` imports it when asked for."""

from bam import privacy as privacy
from bam.core import sampling as sampling
from bam.core import strategy as strategy
from bam.core.clipping import (
    BoundedTransformation,
    chain,
    clip_by_l2_norm,
    clip_per_layer,
    normalize,
)
from bam.core.engine import clipped_sum
from bam.core.gaussian import GaussianNoise
from bam.core.noise import gaussian_noise
from bam.core.oracles import Oracle, bam_exact, bam_sam, dp_sat, dp_sgd
from bam.core.privatize import privatize
from bam.core.seeds import secret_key, seeded_key
from bam.errors import InputError
from bam.models import as_functions as as_functions
from bam.privacy.accounting import epsilon, noise_multiplier
from bam.privacy.plan import PrivacyPlan, make_plan
from bam.privacy.private_training import DrawnBatch, PrivateTraining

__version__: str

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
