"""The parts of an experiment that a config names, and the table of methods.

A section's `name` is one of bam's parts or your "MODULE:FUNCTION", which is imported when the
experiment is built. The section's other keys are passed to it by name. Its other arguments are
public, so its result needs no accounting. A map of images sees each image alone, and must not have
been made from private images (`bam.features.extraction`):

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

`plan` is the run's `bam.PrivacyPlan`: N, l, q, T and σ. `clip_norm` is C, and `sensitivity` is the
clip's S; without privacy, C is `inf` and S is 0. `learning_rate` is a number or, with a schedule, a
function of the step, as in optax.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax
from jaxtyping import PyTree

from bam import models, named
from bam.core import clipping, oracles, pytree
from bam.core.clipping import BoundedTransformation
from bam.core.closure import Closure
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number, is_known
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.features import extraction
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.named import Part
from bam.privacy.plan import PrivacyPlan
from bam.training import schedules
from bam.training.methods import METHODS, Method
from bam.training.schedules import Schedule

with needs("train"):
    from ml_collections import ConfigDict

FEATURES = {  # each is imported when it is used
    "backbone": Part("bam.features.backbone:backbone"),  # its user declares the weights' origin
    "prior": Part(
        "bam.features.prior:prior",
        ("digest",),
        "a fixed map of each image alone, learned from drawn images",
    ),
    "scattering": Part(
        "bam.features.scattering:scattering",
        words="a fixed map of each image alone, made without these data",
    ),
}


def _sgd(
    plan: PrivacyPlan | None,
    clip_norm: Number,
    sensitivity: Number | None,
    learning_rate: Number | optax.Schedule,
    momentum: Number = 0.0,
    per_clip_norm: bool = False,
) -> optax.GradientTransformation:
    """SGD; `per_clip_norm` divides gradients by C, so that the step's size does not depend on C.

    Source: De et al. 2022 (arXiv 2204.13650). One learning rate then fits many C.
    """
    sgd = optax.sgd(learning_rate, momentum or None if is_known(momentum) else momentum)
    if per_clip_norm and is_known(clip_norm) and not 0 < clip_norm < math.inf:
        raise InputError("optimizer.per_clip_norm: a run that is not private has no clip norm")
    return optax.chain(optax.scale(1 / clip_norm), sgd) if per_clip_norm else sgd


OPTIMIZERS = {
    "nadam": Part(lambda plan, clip_norm, sensitivity, learning_rate: optax.nadam(learning_rate)),
    "adam": Part(lambda plan, clip_norm, sensitivity, learning_rate: optax.adam(learning_rate)),
    "sgd": Part(_sgd, ("momentum", "per_clip_norm")),
}


class Section(NamedTuple):
    """A section of a config that names a part.

    Attributes:
      rows: bam's parts, by name.
      num_given: number of arguments of a part's function before its options.
      returned: names that its result must have.
      passes_all: whether the section's own keys are passed even if they are not set.
    """

    rows: Mapping[str, Part | Method | clipping.Clip]
    num_given: int
    returned: tuple[str, ...]
    passes_all: bool = True


REQUIRED = tuple(x for x in datasets.Dataset._fields if x not in datasets.Dataset._field_defaults)
SECTIONS = {
    "method": Section(METHODS, 1, ("ascend", "grad")),
    "clip": Section(clipping.CLIPS, 2, ("init", "update")),
    "optimizer": Section(OPTIMIZERS, 3, ("init", "update")),
    "loss": Section(losses.LOSSES, 0, ("of_output", "check"), passes_all=False),
    "model": Section(models.MODELS, 1, ()),  # see `bam.models.as_functions`
    "dataset": Section({}, 0, REQUIRED, passes_all=False),
    "features": Section(FEATURES, 0, ("__call__",), passes_all=False),
}


def public_options(section: str, name: str) -> tuple[str, ...]:
    """The options of one of bam's parts that a release repeats; () for any other part."""
    row = SECTIONS[section].rows.get(str(name)) if section in SECTIONS else None
    return row.public_options if row else ()


def words(section: str, name: str) -> str:
    """The words of PRIVACY.md on one of bam's parts; "" for any other part."""
    row = SECTIONS[section].rows.get(str(name))
    return "" if row is None or isinstance(row, Method) else row.words


def options_of(section: str, name: str) -> dict[str, Any]:
    """The options of a part beside its section's keys, with their defaults: `named.options_of`."""
    part = SECTIONS[section]
    if ":" in name:
        return named.options_of(named.imported(section, name), part.num_given)
    row = part.rows.get(name)
    if row is None:
        return {}
    if isinstance(row, Method):
        return dict(row.options)
    known = named.options_of(row.make, part.num_given)
    return {x: known[x] for x in row.public_options}


def make_oracle(method: ConfigDict, loss_fn: oracles.LossFn) -> oracles.Oracle:
    """The oracle that a config's `method` section describes.

    That of "non_private" is DP-SGD's, to be used without clipping and noise. InputError for an
    unknown name, missing or surplus parameters, or values out of range.
    """
    options = {k: v for k, v in method.items() if k != "ascent_params"}
    if method.get("ascent_params"):
        options["ascent_mask"] = pytree.matching(method.ascent_params)
    oracle: oracles.Oracle = make("method", options, loss_fn)
    return oracle


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
        return clipping.clip_by_l2_norm(math.inf)
    if not 0 < clip_norm < math.inf:
        raise InputError(f"clip_norm must be a positive finite number, got {clip_norm}")
    clip = clipping.as_declared(make("clip", section.to_dict(), plan, clip_norm))
    clipping.sensitivity_of(clip)
    return clip


def make_optimizer(
    section: ConfigDict, plan: PrivacyPlan, clip_norm: float, sensitivity: Number
) -> optax.GradientTransformation:
    """What follows the noise, as a config's `optimizer` section says: post-processing.

    Numbers of ours are arguments of what is compiled; but for 0, which removes a part of it.
    """
    options = section.to_dict()
    schedule, peak = schedule_of(section, plan), options.pop("learning_rate")
    for key in ("schedule", "warmup_steps"):
        options.pop(key, None)
    rate = schedules.learning_rate(schedule, peak)
    given = {**options, "learning_rate": rate}
    optimizer: optax.GradientTransformation = make("optimizer", given, plan, clip_norm, sensitivity)
    if ":" in section.name:
        return optimizer
    schedule = schedule if callable(rate) else Schedule()
    numbers = {k: v for k, v in options.items() if type(v) is float and v != 0}
    structure = {k: v for k, v in options.items() if k not in {"name", *numbers}}
    compiled = (OPTIMIZERS[section.name].make, structure, schedule)
    arguments = ({**numbers, "clip_norm": clip_norm}, float(peak))
    return optax.GradientTransformation(
        Closure(_init_optimizer, compiled, arguments),
        Closure(_update_optimizer, compiled, arguments),
    )


def schedule_of(section: ConfigDict, plan: PrivacyPlan) -> Schedule:
    """How the learning rate of a config's `optimizer` section changes over the plan's steps."""
    name, warmup_steps = section.get("schedule", "constant"), section.get("warmup_steps", 0)
    return Schedule(name, warmup_steps, plan.training_steps)


def _ours(
    row: Any, structure: JsonObject, schedule: Schedule, numbers: JsonObject, peak: Number
) -> optax.GradientTransformation:
    rate = schedules.learning_rate(schedule, peak)
    optimizer: optax.GradientTransformation = row(
        plan=None, sensitivity=None, learning_rate=rate, **structure, **numbers
    )
    return optimizer


def _init_optimizer(*args: Any) -> PyTree:
    *optimizer, params = args
    return _ours(*optimizer).init(params)


def _update_optimizer(
    row: Any,
    structure: JsonObject,
    schedule: Schedule,
    numbers: JsonObject,
    peak: Number,
    *given: Any,
) -> tuple[PyTree, PyTree]:
    return _ours(row, structure, schedule, numbers, peak).update(*given)


def make_model(section: ConfigDict, num_classes: int) -> models.Network:
    """The network that a config's `model` section describes, from batches of inputs to logits."""
    if ":" not in section.name:
        return models.create(num_classes=num_classes, **section)
    network: models.Network = make("model", section.to_dict(), num_classes)
    return network


def make_loss(section: ConfigDict) -> losses.Loss:
    """The loss that a config's `loss` section describes."""
    loss: losses.Loss = make("loss", set_keys(section, ""))
    return loss


def make_features(section: ConfigDict) -> extraction.FeatureMap | None:
    """The map of images that a config's `features` section describes; None: pixels as they are."""
    options = set_keys(section, "cache")
    if not any(options.values()):  # neither a name nor anything that needs one
        return None
    feature_map: extraction.FeatureMap = make("features", {"name": "", **options})
    return feature_map


def set_keys(section: ConfigDict, left_out: str) -> JsonObject:
    """What is set of a section, be it False, 0 or "": all but None and the key to leave out."""
    return {k: v for k, v in section.items() if v is not None and k != left_out}


def make(section: str, options: JsonObject, *given: Any) -> Any:
    """What a section names makes of what it is given and the section's options."""
    name, rows = options.pop("name"), SECTIONS[section].rows
    if ":" not in name and name not in rows:
        raise InputError(
            f"unknown {section} {name!r}; choose from {', '.join(rows)}, or MODULE:FUNCTION"
        )
    maker = named.imported(section, name) if ":" in name else rows[name].make
    part = named.call(f"{section} {name}", maker, *given, **options)
    if missing := [x for x in SECTIONS[section].returned if not hasattr(part, x)]:
        raise InputError(
            f"{section} {name} returns a {type(part).__name__}, without {', '.join(missing)}: see "
            "the table in bam/training/parts.py"
        )
    return part
