"""The parts of a run, made from the sections of its config by the rows of `bam.part_table`."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from bam import models, named, part_table
from bam.core import clipping, oracles, program, pytree
from bam.core.clipping import Bounded
from bam.core.program import STATIC
from bam.core.pytree import Params
from bam.core.scalars import Number, is_known
from bam.errors import InputError
from bam.extras import needs
from bam.features import extraction
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.part_table import SECTIONS
from bam.privacy.plan import PrivacyPlan
from bam.text import choose
from bam.training import keys, schedules
from bam.training.schedules import Schedule

with needs("train"):
    from ml_collections import ConfigDict


def nadam(
    clip_norm: Number, learning_rate: Number | optax.Schedule
) -> optax.GradientTransformation:
    """Returns NAdam, which does not depend on C."""
    return optax.nadam(learning_rate)


def adam(clip_norm: Number, learning_rate: Number | optax.Schedule) -> optax.GradientTransformation:
    """Returns Adam, which does not depend on C."""
    return optax.adam(learning_rate)


def sgd(
    clip_norm: Number,
    learning_rate: Number | optax.Schedule,
    momentum: Number = 0.0,
    per_clip_norm: bool = False,
) -> optax.GradientTransformation:
    """Returns SGD, whose steps do not depend on C with `per_clip_norm`, which divides by C.

    Source: De et al. 2022 (arXiv 2204.13650). One learning rate then fits many C.
    """
    # With momentum 0, optax would keep a trace as large as the weights. A traced momentum cannot be
    # compared with 0; the caller passes a 0 untraced.
    plain = optax.sgd(learning_rate, momentum or None if is_known(momentum) else momentum)
    if per_clip_norm and is_known(clip_norm) and not 0 < clip_norm < math.inf:
        raise InputError(
            "optimizer.per_clip_norm needs a private run: without clipping there is no clip norm"
        )
    return optax.chain(optax.scale(1 / clip_norm), plain) if per_clip_norm else plain


def options_of(section: str, name: str) -> dict[str, Any]:
    """Returns the options of a part, with their defaults, as `named.options_of` returns them.

    Those of one of bam's parts are its public options and its keys in the table of keys. {} for a
    name that bam does not have.
    """
    num_given = SECTIONS[section].num_given
    if ":" in name and num_given is not None:
        return named.options_of(named.import_function(section, name), num_given)
    row = part_table.row(section, name)
    if row is None:
        return {}
    taken = {*row.public_options, *keys.options(section)}
    options = named.options_of(row.make, 0).items()
    return {x: default for x, default in options if x in taken} | dict(row.defaults)


def make_oracle(method: ConfigDict, loss_fn: oracles.LossFn) -> oracles.Method:
    """Returns the oracle of a config's `method` section.

    The oracle of "non_private" is that of DP-SGD, to be used without clipping and noise. InputError
    for an unknown name, missing or surplus options, or values out of range.
    """
    options = {k: v for k, v in method.items() if k != "ascent_params"}
    if method.get("ascent_params"):
        options["ascent_mask"] = pytree.name_mask(method.ascent_params)
    oracle: oracles.Method = make("method", options, loss_fn)
    return oracle


def make_clip(section: ConfigDict, plan: PrivacyPlan, clip_norm: float) -> Bounded:
    """Returns the per-example transform of a config's `clip` section, with finite sensitivity.

    For a run that is not private, it bounds nothing. InputError as `make_oracle`, for a C that is
    not positive and finite, or if the transform declares no finite bound.
    """
    # Diagnostics of a run without privacy need a clip, too.
    if not plan.private:
        return clipping.clip_by_l2_norm(math.inf)
    if not 0 < clip_norm < math.inf:
        raise InputError(f"clip_norm must be a positive finite number, got {clip_norm}")
    given = (plan, clip_norm) if ":" in section.name else (clip_norm,)
    clip = clipping.as_declared(make("clip", section.to_dict(), *given))
    clipping.sensitivity_of(clip)
    return clip


@program.record
class EvaluatedOptimizer:
    """An optimizer whose weights are evaluated and released elsewhere than where it steps from.

    For example `EvaluatedOptimizer(*schedule_free(…), schedule_free_eval_params)` of optax.contrib.

    Attributes:
      init, update: those of an optax transform.
      eval_params: `(state, params) -> params`, the weights to evaluate and to release; they may use
        the optimizer's state, which is post-processing of the private gradients.
    """

    init: Callable[..., PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    eval_params: Callable[[PyTree, PyTree], PyTree]

    def __post_init__(self) -> None:
        """Makes the functions pytrees."""
        for name, fn in vars(self).copy().items():
            vars(self)[name] = program.as_partial(fn)


AnyOptimizer: TypeAlias = optax.GradientTransformation | EvaluatedOptimizer


def make_optimizer(
    section: ConfigDict, plan: PrivacyPlan, clip_norm: float, sensitivity: Number
) -> AnyOptimizer:
    """Returns the optax transform of a config's `optimizer` section.

    It follows the noise, so it is post-processing. If the optimizer is bam's, the peak of the
    learning rate, C and the float options are arguments of the compiled step, so that other values
    compile nothing. An option that is 0 is compiled in, because it may remove a part of the step.
    """
    options = section.to_dict()
    schedule, peak = schedule_of(section, plan), options.pop("learning_rate")
    for key in ("schedule", "warmup_steps"):
        options.pop(key, None)
    rate = schedules.learning_rate(schedule, peak)
    if ":" in section.name:
        optimizer: AnyOptimizer = make(
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
        transform: optax.GradientTransformation = make("optimizer", options, self.clip_norm)
        return transform

    def init(self, params: PyTree) -> PyTree:
        """Returns the state before the first step."""
        return self.transform().init(params)

    def update(self, grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        """Returns the update of the weights, and the next state."""
        return self.transform().update(grads, state, params)


def schedule_of(section: ConfigDict, plan: PrivacyPlan) -> Schedule:
    """Returns the schedule of a config's `optimizer` section, over the steps of the plan."""
    # The section of a user's optimizer may lack these keys.
    name, warmup_steps = section.get("schedule", "constant"), section.get("warmup_steps", 0)
    return Schedule(name, warmup_steps, plan.training_steps)


def make_network(
    config: ConfigDict, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    """Returns the criterion of outputs, the network, and the loss of an example.

    For bam's models and losses, equal sections give the same objects, so that runs share compiled
    programs.
    """
    # A user's function may return another network for the same options, so it is called each time.
    if ":" in config.model.name + config.loss.name:
        return _new_network(config, num_classes, tuple(shape))
    names, values = ("model", "loss", "lora", "convolution", "precision"), config.to_dict()
    sections = {name: values[name] for name in names}
    text = json.dumps(sections, default=lambda x: np.asarray(x).tolist())
    return _shared_network(text, num_classes, tuple(shape))


@functools.lru_cache(maxsize=32)
def _shared_network(
    sections: str, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    return _new_network(ConfigDict(json.loads(sections)), num_classes, shape)


def _new_network(
    config: ConfigDict, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    criterion, network = make_loss(config.loss), make_model(config.model, num_classes)
    with named.refused_by(f"model {config.model.name}"):
        model = models.as_functions(
            network,
            shape,
            convolution=config.convolution,
            precision=config.precision,
            lora_rank=config.lora.rank,
            lora_targets=config.lora.targets,
            loss=criterion,
        )

    def loss(params: Params, example: PyTree) -> Float[Array, ""]:
        return model.loss(finetune.merge(params, example["frozen"]), example)

    return criterion, model, loss


def make_model(section: ConfigDict, num_classes: int) -> models.Network:
    """Returns the network of a config's `model` section, from batches of inputs to logits."""
    if ":" not in section.name:
        return models.create(num_classes=num_classes, **section)
    network: models.Network = make("model", section.to_dict(), num_classes)
    return network


def make_loss(section: ConfigDict) -> losses.Loss:
    """Returns the loss of a config's `loss` section."""
    loss: losses.Loss = make("loss", set_keys(section, ""))
    return loss


def make_features(section: ConfigDict) -> extraction.FeatureMap | None:
    """Returns the map of images of a config's `features` section, or None for pixels."""
    options = set_keys(section, "cache")
    # An option without a name is not ignored: `make` refuses the name "".
    if not any(options.values()):
        return None
    feature_map: extraction.FeatureMap = make("features", {"name": "", **options})
    return feature_map


def set_keys(section: ConfigDict, left_out: str) -> JsonObject:
    """Returns the keys of a section that are not None, without the one left out.

    Keys that are False, 0 or "" are among them.
    """
    return {k: v for k, v in section.items() if v is not None and k != left_out}


def make(section: str, options: JsonObject, *args: Any) -> Any:
    """Returns the part that a section names, from its function.

    Args:
      section: one of `SECTIONS` that takes users' functions.
      options: the section's keys; `name` is removed from them.
      *args: bam's arguments, see `bam.part_table`.

    Raises:
      InputError: for an unknown name, options that the function does not take, or a result that
        lacks a name in the section's `returned`; and for a ValueError of the user's function.
    """
    name, rows = options.pop("name"), SECTIONS[section].rows
    if ":" not in name and name not in rows:
        known = choose(name, [*rows], ", or MODULE:FUNCTION")
        raise InputError(f"unknown {section} {name!r}{known}")
    maker = named.import_function(section, name) if ":" in name else rows[name].make
    part = named.call(f"{section} {name}", maker, *args, **options)
    if missing := [x for x in SECTIONS[section].returned if not hasattr(part, x)]:
        raise InputError(
            f"{section} {name} returns a {type(part).__name__}, without {', '.join(missing)}: see "
            "the table in bam/part_table.py"
        )
    return part
