"""The parts of an experiment that a config names, and the table of methods.

A section's `name` is one of ours or your own "MODULE:FUNCTION", imported when the experiment is
built; the section's other keys are passed to it by name. Whatever it is given besides them is
public, so what it makes of that needs no accounting; a map of images sees each of them alone, and
must not have been made from any of the private ones (`bam.features.extraction`):

================ ================================================= ============================
section          your function                                     returns
================ ================================================= ============================
`method`         `(loss_fn, **options)`                            `bam.Oracle`
`clip`           `(plan, clip_norm, **options)`                    `bam.BoundedTransformation`
`optimizer`      `(plan, clip_norm, sensitivity, **options)`       any optax transform
`model`          `(num_classes, **options)`                        a Flax module, or functions
`dataset`        `(**options)`, those that are set                 `bam.data.datasets.Dataset`
`features`       `(**options)`, those that are set                 a map of images, row by row
`loss`           `(**options)`, those that are set                 `bam.models.losses.Loss`
================ ================================================= ============================

`plan` is the run's `bam.PrivacyPlan`: N, l, q, T and σ. `clip_norm` is C and `sensitivity` the S of
the clip; of a run that is not private C is `inf` and S is 0.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from bam import models, named
from bam.core import oracles, pytree
from bam.core.clipping import (
    BoundedTransformation,
    as_declared,
    clip_by_l2_norm,
    clip_per_layer,
    normalize,
    sensitivity_of,
)
from bam.core.pytree import Grads, Params
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.features import extraction, prior
from bam.features.backbone import backbone
from bam.features.scattering import scattering
from bam.files import JsonMapping, JsonObject
from bam.models import finetune, losses
from bam.privacy.plan import PrivacyPlan

with needs("train"):
    from ml_collections import ConfigDict


class Method(NamedTuple):
    """A row of the table of methods: all that is known of a method.

    Attributes:
      make: `(loss_fn, **options) -> Oracle`.
      label: its name in tables and legends.
      options: what it reads of a config's `method` section, with the defaults.
      strength: the option that says how far it ascends; "" for a method that does not.
      symbol: the letter of that.
    """

    make: Callable[..., oracles.Oracle]
    label: str
    options: Mapping[str, int | float | str] = {}
    strength: str = ""
    symbol: str = ""


# BAM's direction, made cheaper: from so many of the views (0: all), and moving only parameters
# whose path matches a regular expression ("": all), for example "GroupNorm".
ASCENT: dict[str, int | float | str] = {"ascent_views": 0, "ascent_params": ""}

METHODS = {
    "non_private": Method(oracles.dp_sgd, "non-private"),
    "dp_sgd": Method(oracles.dp_sgd, "DP-SGD"),
    "dp_sat": Method(
        oracles.dp_sat, "DP-SAT", options={"radius": 0.05}, strength="radius", symbol="ρ"
    ),
    "bam_sam": Method(
        oracles.bam_sam,
        "BAM (SAM)",
        options={"radius": 0.05, "mix": 1.0, **ASCENT},
        strength="radius",
        symbol="λ",
    ),
    "bam_exact": Method(
        oracles.bam_exact,
        "BAM (exact)",
        options={"penalty": 0.05, **ASCENT},
        strength="penalty",
        symbol="λ",
    ),
}
CLIPS: dict[str, Callable[..., BoundedTransformation]] = {
    "l2": lambda plan, clip_norm: clip_by_l2_norm(clip_norm),
    "normalize": lambda plan, clip_norm, gamma=0.01: normalize(clip_norm, gamma),
    "per_layer": lambda plan, clip_norm: clip_per_layer(clip_norm),
}
FEATURES: dict[str, Callable[..., extraction.FeatureMap]] = {
    "backbone": backbone,
    "prior": prior.prior,
    "scattering": scattering,
}


def _sgd(
    plan: PrivacyPlan,
    clip_norm: float,
    sensitivity: float,
    learning_rate: float,
    momentum: float = 0.0,
    per_clip_norm: bool = False,
) -> optax.GradientTransformation:
    """SGD; `per_clip_norm` counts gradients in units of C, so that C is no part of the step's size.

    So do De et al. (arXiv 2204.13650): a learning rate then fits many C.
    """
    sgd = optax.sgd(learning_rate, momentum or None)
    if per_clip_norm and not 0 < clip_norm < math.inf:
        raise InputError("optimizer.per_clip_norm: a run that is not private has no clip norm")
    return optax.chain(optax.scale(1 / clip_norm), sgd) if per_clip_norm else sgd


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "nadam": lambda plan, clip_norm, sensitivity, learning_rate: optax.nadam(learning_rate),
    "adam": lambda plan, clip_norm, sensitivity, learning_rate: optax.adam(learning_rate),
    "sgd": _sgd,
}


def label(name: str) -> str:
    """A method's name in tables and legends; a method of one's own keeps its name."""
    return METHODS[name].label if name in METHODS else name


def full_label(method: JsonMapping) -> str:
    """A method's name with its strength, from the `method` section of a config.

    Examples:
      >>> full_label({"name": "bam_sam", "radius": 0.02, "mix": 1.0, "ascent_views": 1})
      'BAM (SAM), λ = 0.02, ascent of 1 views'
    """
    text = label(method["name"])
    row = METHODS.get(method["name"])
    if row and row.strength:
        text += f", {row.symbol} = {strength(method):g}"
    if method.get("ascent_views"):
        text += f", ascent of {method['ascent_views']} views"
    if method.get("ascent_params"):
        text += f", ascent on {method['ascent_params']}"
    return text


def strength(method: JsonMapping) -> float:
    """λ of BAM (α·r in the SAM form), ρ of DP-SAT, 0 for methods that have none."""
    row = METHODS.get(method["name"])
    return float(method[row.strength]) * method.get("mix", 1.0) if row and row.strength else 0.0


def is_private(name: str) -> bool:
    """Whether a method asks for privacy; `build` plans a run for it that has it, or refuses."""
    return name != "non_private"


def is_plain(name: str) -> bool:
    """Whether a method's gradient is the plain one, as DP-SGD's is."""
    return name in METHODS and METHODS[name].make is oracles.dp_sgd


# What is used of what a function of one's own returns.
RETURNED = {
    "method": ("ascend", "grad"),
    "clip": ("init", "update"),
    "optimizer": ("init", "update"),
    "loss": ("of_output", "check"),
    "model": (),  # see `bam.models.as_functions`
    "dataset": tuple(
        x for x in datasets.Dataset._fields if x not in datasets.Dataset._field_defaults
    ),
    "features": ("__call__",),
}


def make_oracle(method: ConfigDict, loss_fn: oracles.LossFn) -> oracles.Oracle:
    """The oracle that a config's `method` section describes.

    That of "non_private" is DP-SGD's, to be used without clipping and noise. InputError for an
    unknown name, missing or surplus parameters, or values out of range.
    """
    options = {k: v for k, v in method.items() if k != "ascent_params"}
    if method.get("ascent_params"):
        options["ascent_mask"] = pytree.matching(method.ascent_params)
    known = {name: row.make for name, row in METHODS.items()}
    return make("method", known, options, loss_fn)


def make_gradient(
    method: ConfigDict, loss_fn: oracles.LossFn
) -> Callable[[Params, Params, PyTree], Grads]:
    """`(trained, frozen, example) -> gradient` of the trained parameters, as in a first step."""

    def gradient(trained: Params, frozen: Params, example: PyTree) -> Grads:
        oracle = make_oracle(method, finetune.with_frozen(loss_fn, frozen))
        return oracle.grad(oracle.ascend(trained, optax.tree.zeros_like(trained)), example)

    return gradient


def make_clip(section: ConfigDict, plan: PrivacyPlan, clip_norm: float) -> BoundedTransformation:
    """The per-example transform that a config's `clip` section describes, of finite sensitivity.

    Of a run that is not private it is one that bounds nothing. InputError as `make_oracle`, for a C
    that cannot be, or if the transform declares no finite bound.
    """
    if not plan.private:
        return clip_by_l2_norm(math.inf)
    if not 0 < clip_norm < math.inf:
        raise InputError(f"clip_norm must be a positive finite number, got {clip_norm}")
    clip = as_declared(make("clip", CLIPS, section.to_dict(), plan, clip_norm))
    sensitivity_of(clip)
    return clip


def make_optimizer(
    section: ConfigDict, plan: PrivacyPlan, clip_norm: float, sensitivity: float
) -> optax.GradientTransformation:
    """What follows the noise, as a config's `optimizer` section says: post-processing."""
    public = (plan, clip_norm, sensitivity)
    optimizer: optax.GradientTransformation = make(
        "optimizer", OPTIMIZERS, section.to_dict(), *public
    )
    return optimizer


def make_model(section: ConfigDict, num_classes: int) -> models.Network:
    """The network that a config's `model` section describes, from batches of inputs to logits."""
    if ":" not in section.name:
        return models.create(num_classes=num_classes, **section)
    network: models.Network = make("model", {}, section.to_dict(), num_classes)
    return network


def make_loss(section: ConfigDict) -> losses.Loss:
    """The loss that a config's `loss` section describes."""
    loss: losses.Loss = make("loss", losses.LOSSES, set_keys(section, ""))
    return loss


def example_like(
    config: ConfigDict,
    shape: tuple[int, ...],
    label: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((), jnp.int32),  # noqa: B008
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the example that a loss is given, of images of a shape: for tracing."""
    inputs = num_inputs(config)
    each = (inputs,) if config.dataset.group_size else ()
    present = {"present": jax.ShapeDtypeStruct(each, jnp.bool_)} if each else {}
    return {
        "image": jax.ShapeDtypeStruct((inputs, *shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((*each, *label.shape), label.dtype),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "row": jax.ShapeDtypeStruct((), jnp.int32),
        **present,
    }


def num_inputs(config: ConfigDict) -> int:
    """How many inputs a network is given at once: of a user, those of k examples."""
    inputs_each = config.augment.views + config.augment.mixtures
    return int(inputs_each * max(1, config.dataset.group_size))


def make_features(section: ConfigDict) -> extraction.FeatureMap | None:
    """The map of images that a config's `features` section describes; None: pixels as they are."""
    options = set_keys(section, "cache")
    if not any(options.values()):  # neither a name nor anything that needs one
        return None
    feature_map: extraction.FeatureMap = make("features", FEATURES, {"name": "", **options})
    return feature_map


def features_digest(section: ConfigDict) -> str:
    """SHA-256 of the weights that a map of images has; "" of none."""
    return (
        prior.SHA256 if section.get("name") == "prior" else finetune.digest(section.get("weights"))
    )


def set_keys(section: ConfigDict, left_out: str) -> JsonObject:
    """What is set of a section, be it False, 0 or "": all but None and the key to leave out."""
    return {k: v for k, v in section.items() if v is not None and k != left_out}


def make(
    section: str, known: Mapping[str, Callable[..., Any]], options: JsonObject, *given: Any
) -> Any:
    """What a section names makes of what it is given and the section's options."""
    name = options.pop("name")
    maker = named.imported(section, name) if ":" in name else known.get(name)
    if maker is None:
        raise InputError(
            f"unknown {section} {name!r}; choose from {', '.join(known)}, or MODULE:FUNCTION"
        )
    part = named.call(f"{section} {name}", maker, *given, **options)
    if missing := [needed for needed in RETURNED[section] if not hasattr(part, needed)]:
        raise InputError(
            f"{section} {name} returns a {type(part).__name__}, without {', '.join(missing)}: see "
            "the table in bam/training/registry.py"
        )
    return part
