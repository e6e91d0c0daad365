"""The parts of an experiment that a config names: bam's tables of them, and functions of your own.

A section's `name` is one of bam's parts or your "MODULE:FUNCTION", which is imported when the
experiment is built. The section's other keys are passed to the function by name, after the
arguments in the table below. These arguments are public, so its result needs no accounting. A map
of images sees each image alone, and must not have been made from private images
(`bam.features.extraction`).

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

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax
from jaxtyping import PyTree

from bam import models, named
from bam.core import clipping, oracles, program, pytree
from bam.core.clipping import Bounded
from bam.core.program import STATIC
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number, is_known
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.features import extraction
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.named import Part
from bam.privacy import clips
from bam.privacy.plan import PrivacyPlan
from bam.training import keys, schedules
from bam.training.methods import METHODS, Method
from bam.training.schedules import Schedule

with needs("train"):
    from ml_collections import ConfigDict

# As texts, so that a run imports no map but its own.
FEATURES = {
    # Without words: only the user knows where the weights came from, and declares it.
    "backbone": Part("bam.features.backbone:backbone", ("interpolation", "digest")),
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
    # With momentum 0, optax would keep a trace as large as the weights. A traced momentum cannot be
    # compared with 0; the caller passes a 0 untraced.
    sgd = optax.sgd(learning_rate, momentum or None if is_known(momentum) else momentum)
    if per_clip_norm and is_known(clip_norm) and not 0 < clip_norm < math.inf:
        raise InputError(
            "optimizer.per_clip_norm needs a private run: without clipping there is no clip norm"
        )
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
    """

    rows: Mapping[str, Part | Method]
    num_given: int
    returned: tuple[str, ...]


REQUIRED = tuple(x for x in datasets.Dataset._fields if x not in datasets.Dataset._field_defaults)
SECTIONS = {
    "method": Section(METHODS, 1, ("ascend", "grad")),
    "clip": Section(clips.CLIPS, 2, ("init", "update")),
    "optimizer": Section(OPTIMIZERS, 3, ("init", "update")),
    "loss": Section(losses.LOSSES, 0, ("of_output", "check")),
    "model": Section(models.MODELS, 1, ()),  # see `bam.models.as_functions`
    "dataset": Section({}, 0, REQUIRED),
    "features": Section(FEATURES, 0, ("__call__",)),
}


def public_options(section: str, name: str) -> tuple[str, ...]:
    """The options of one of bam's parts that a release repeats; () for a part of the user's."""
    row = SECTIONS[section].rows.get(str(name)) if section in SECTIONS else None
    return row.public_options if row else ()


def words(section: str, name: str) -> str:
    """The sentence of PRIVACY.md on one of bam's parts; "" for none, or a part of the user's."""
    row = SECTIONS[section].rows.get(str(name))
    return "" if row is None or isinstance(row, Method) else row.words


def options_of(section: str, name: str) -> dict[str, Any]:
    """The options of a part, with their defaults, as `named.options_of` returns them.

    Those of one of bam's parts are its public options and its keys in the table of keys. {} for a
    name that bam does not have.
    """
    part = SECTIONS[section]
    if ":" in name:
        return named.options_of(named.imported(section, name), part.num_given)
    row = part.rows.get(name)
    if row is None:
        return {}
    if isinstance(row, Method):
        return dict(row.options)
    defaults = named.options_of(row.make, part.num_given)
    taken = {*row.public_options, *keys.options(section)}
    return {x: default for x, default in defaults.items() if x in taken}


def make_oracle(method: ConfigDict, loss_fn: oracles.LossFn) -> oracles.Method:
    """The oracle of a config's `method` section.

    The oracle of "non_private" is that of DP-SGD, to be used without clipping and noise. InputError
    for an unknown name, missing or surplus options, or values out of range.
    """
    options = {k: v for k, v in method.items() if k != "ascent_params"}
    if method.get("ascent_params"):
        options["ascent_mask"] = pytree.matching(method.ascent_params)
    oracle: oracles.Method = make("method", options, loss_fn)
    return oracle


def make_gradient(
    method: ConfigDict, loss_fn: oracles.LossFn
) -> Callable[[Params, Params, PyTree], Grads]:
    """`(trained, frozen, example) -> gradient` of the trained parameters, as in a first step."""

    def gradient(trained: Params, frozen: Params, example: PyTree) -> Grads:
        oracle = make_oracle(method, finetune.with_frozen(loss_fn, frozen))
        return oracle.grad(oracle.ascend(trained, optax.tree.zeros_like(trained)), example)

    return gradient


def make_clip(section: ConfigDict, plan: PrivacyPlan, clip_norm: float) -> Bounded:
    """The per-example transform of a config's `clip` section, with finite sensitivity.

    For a run that is not private, it bounds nothing. InputError as `make_oracle`, for a C that is
    not positive and finite, or if the transform declares no finite bound.
    """
    # Diagnostics of a run without privacy need a clip, too.
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
    """The optax transform of a config's `optimizer` section; it follows the noise.

    It is post-processing. If the optimizer is bam's, the peak of the learning rate, C and the float
    options are arguments of the compiled step, so that other values compile nothing. An option that
    is 0 is compiled in, because it may remove a part of the step.
    """
    options = section.to_dict()
    schedule, peak = schedule_of(section, plan), options.pop("learning_rate")
    for key in ("schedule", "warmup_steps"):
        options.pop(key, None)
    rate = schedules.learning_rate(schedule, peak)
    if ":" in section.name:
        optimizer: optax.GradientTransformation = make(
            "optimizer", options | {"learning_rate": rate}, plan, clip_norm, sensitivity
        )
        return optimizer
    # All constant rates are one structure, whatever the number of steps.
    schedule = schedule if callable(rate) else Schedule()
    numbers: dict[str, Number] = {k: v for k, v in options.items() if type(v) is float and v != 0}
    structure = tuple((k, v) for k, v in options.items() if k not in numbers)
    ours = Optimizer(numbers, float(peak), float(clip_norm), structure, schedule)
    ours.transform()  # which checks the options
    return optax.GradientTransformation(ours.init, ours.update)


@program.record
class Optimizer:
    """One of bam's optimizers, whose numbers are arguments of a compiled step.

    `optax.inject_hyperparams` would keep the numbers in the state, and so in each checkpoint.

    Attributes:
      numbers: the options that are floats, but not 0.
      peak: the peak of the learning rate.
      clip_norm: C.
      structure: the name and the other options.
      schedule: the schedule of the learning rate.
    """

    numbers: dict[str, Number]
    peak: Number
    clip_norm: Number
    structure: tuple[tuple[str, Any], ...] = dataclasses.field(metadata=STATIC)
    schedule: Schedule = dataclasses.field(metadata=STATIC)

    def transform(self) -> optax.GradientTransformation:
        """Returns optax's transform, also of traced numbers.

        InputError as `make`.
        """
        rate = schedules.learning_rate(self.schedule, self.peak)
        options = {**dict(self.structure), **self.numbers, "learning_rate": rate}
        # No row reads the plan or S, which would be constants of the program.
        transform: optax.GradientTransformation = make(
            "optimizer", options, None, self.clip_norm, None
        )
        return transform

    def init(self, params: PyTree) -> PyTree:
        """Returns the state before the first step."""
        return self.transform().init(params)

    def update(self, grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        """Returns the update of the weights, and the next state."""
        return self.transform().update(grads, state, params)


def schedule_of(section: ConfigDict, plan: PrivacyPlan) -> Schedule:
    """The schedule of a config's `optimizer` section, over the steps of the plan."""
    # The section of a user's optimizer may lack these keys.
    name, warmup_steps = section.get("schedule", "constant"), section.get("warmup_steps", 0)
    return Schedule(name, warmup_steps, plan.training_steps)


def make_model(section: ConfigDict, num_classes: int) -> models.Network:
    """The network of a config's `model` section, from batches of inputs to logits."""
    if ":" not in section.name:
        return models.create(num_classes=num_classes, **section)
    network: models.Network = make("model", section.to_dict(), num_classes)
    return network


def make_loss(section: ConfigDict) -> losses.Loss:
    """The loss of a config's `loss` section."""
    loss: losses.Loss = make("loss", set_keys(section, ""))
    return loss


def make_features(section: ConfigDict) -> extraction.FeatureMap | None:
    """The map of images of a config's `features` section; None if the run reads pixels."""
    options = set_keys(section, "cache")
    # An option without a name is not ignored: `make` refuses the name "".
    if not any(options.values()):
        return None
    feature_map: extraction.FeatureMap = make("features", {"name": "", **options})
    return feature_map


def set_keys(section: ConfigDict, left_out: str) -> JsonObject:
    """The keys of a section that are not None, also False, 0 and "", without the one left out."""
    return {k: v for k, v in section.items() if v is not None and k != left_out}


def make(section: str, options: JsonObject, *args: Any) -> Any:
    """The part that a section names, from its function.

    Args:
      section: one of `SECTIONS`.
      options: the section's keys; `name` is removed from them.
      *args: bam's arguments, see the table at the top.

    Raises:
      InputError: for an unknown name, options that the function does not take, or a result that
        lacks a name in the section's `returned`; and for a ValueError of the user's function.
    """
    name, rows = options.pop("name"), SECTIONS[section].rows
    if ":" not in name and name not in rows:
        raise InputError(
            f"unknown {section} {name!r}; choose from {', '.join(rows)}, or MODULE:FUNCTION"
        )
    maker = named.imported(section, name) if ":" in name else rows[name].make
    part = named.call(f"{section} {name}", maker, *args, **options)
    if missing := [x for x in SECTIONS[section].returned if not hasattr(part, x)]:
        raise InputError(
            f"{section} {name} returns a {type(part).__name__}, without {', '.join(missing)}: see "
            "the table in bam/training/parts.py"
        )
    return part
