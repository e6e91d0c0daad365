"""Bias-Aware Minimisation and its neighbours: differentially private training in JAX.

An *oracle* (`dp_sgd`, `dp_sat`, `bam_sam`, `bam_exact`) computes the gradient of one example. An
optax *transform* (`clip_by_l2_norm`, `normalize`, `clip_per_layer`) bounds it. The *engine*
(`clipped_sum`) sums the bounded gradients and adds the noise (`gaussian_noise`). `privatize` does
all of that in one transform, for batches that fit in memory. `epsilon` and `noise_multiplier`
compute ε from the noise, and the noise from ε. `PrivateTraining` couples sampler, clip, noise and
ε, so that they cannot disagree: begin there.
"""

import importlib

# It sets a flag of XLA, which XLA reads only once, when JAX first computes.
from bam import compiler  # noqa: F401

__version__ = "0.4.0"

# Module -> the names that `bam` exports from it, imported on first use: `bam --help` needs no JAX.
_EXPORTED = {
    "core": ("sampling", "strategy"),
    "core.clipping": (
        "BoundedTransformation", "chain", "clip_by_l2_norm", "clip_per_layer", "normalize",
    ),
    "core.engine": ("clipped_sum",),
    "core.gaussian": ("GaussianNoise",),
    "core.noise": ("gaussian_noise",),
    "core.oracles": ("Oracle", "bam_exact", "bam_sam", "dp_sat", "dp_sgd"),
    "core.privatize": ("privatize",),
    "core.seeds": ("secret_key", "seeded_key"),
    "errors": ("InputError",),
    "models": ("as_functions",),  # needs Flax, so it is not in __all__
    "privacy.accounting": ("epsilon", "noise_multiplier"),
    "privacy.plan": ("PrivacyPlan", "make_plan"),
    "privacy.private_training": ("DrawnBatch", "PrivateTraining"),
}  # fmt: skip
_MODULE_OF = {name: f"bam.{module}" for module, names in _EXPORTED.items() for name in names}

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
    """Imports a name that `bam` exports, or the folder `bam.privacy`, on first use."""
    if name == "privacy":
        return importlib.import_module("bam.privacy")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bam' has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    if name in ("sampling", "strategy"):
        attribute: object = importlib.import_module(f"{module.__name__}.{name}")
    else:
        attribute = getattr(module, name)
    # From now on Python finds the name itself, and does not call this function again.
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, "privacy"})
