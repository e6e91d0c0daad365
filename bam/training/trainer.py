"""The settings and parts of a run, and the functions that are compiled of them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from bam import memory, models
from bam.core import pytree, sampling
from bam.core.program import compiled_once
from bam.core.pytree import Params
from bam.core.tracing import being_traced
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.models.normalisation import Normalisation
from bam.privacy.plan import PrivacyPlan
from bam.privacy.private_gradient import DrawnBatch, batch_of, fitting_rows, mean_of
from bam.privacy.private_training import PrivateTraining
from bam.privacy.rounding import rounded_up
from bam.training import devices, examples, parts, schedules
from bam.training import step as steps
from bam.training.step import TrainState, first_state

with needs("train"):
    from ml_collections import ConfigDict

Output = TypeVar("Output")
STEP, BIAS = "a step", "measuring the clipping bias"
SPARE = 0.9  # share of the free memory that an advised microbatch size may take


def compiled(
    function: Callable[..., Output], what: str, *, donate: tuple[int, ...] = ()
) -> functools.cached_property[Callable[..., Output]]:
    """A method from a function of `Parts`, compiled on its first call.

    Trainers of the same structure share the program. The first call of a trainer is an InputError
    if the program does not fit the memory; it names a `microbatch_size` that does.

    Args:
      function: the function; its first argument is the parts.
      what: what it computes, for a message.
      donate: the arguments, counted without the parts, whose memory the result may take.
    """

    def bound(self: "Trainer") -> Callable[..., Output]:
        program = compiled_once(function, self.parts, donate=donate)

        @functools.wraps(program)
        def call(*args: PyTree) -> Output:
            # What is traced runs elsewhere, perhaps on devices that are not there.
            if function not in self.fitting and not being_traced():
                self.check_memory(function, what, *args, donate=donate)
            return program(*args)

        return call

    return functools.cached_property(bound)


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """The settings and parts of a run, and its compiled functions; it serves any number of seeds.

    Attributes:
      config: the configuration it was built from.
      listing: the data set, whose images are blank if they will be features.
      load: returns the data set.
      plan: the privacy plan of a run.
      parts: what the compiled functions read: network, method, clip, noise, optimizer, devices.
      criterion: the loss of one output, with its accuracy and metrics.
      weights: the weights that training begins from, for parameters that are not random.
      features_digest: SHA-256 of the weights of the map of images; "" without such weights.
      normalisation: the normalisation of pixels that the weights, or those of the map, expect;
        None if neither is used.
      log: called with a line on long waits.
    """

    config: ConfigDict
    listing: datasets.Dataset
    load: Callable[[], datasets.Dataset]
    plan: PrivacyPlan
    parts: steps.Parts
    criterion: losses.Loss
    weights: finetune.Weights
    features_digest: str
    normalisation: Normalisation | None
    log: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        """ValueError if the parts are of another plan, config or data set, which was replaced."""
        plan, config, parts = self.plan, self.config, self.parts
        if (parts.gradient.mean, parts.is_private) != (mean_of(plan), plan.private):
            raise ValueError("the parts have the noise of another plan: build it with plan=PLAN")
        size = fitting_rows(plan, parts.gradient.clip, config.microbatch_size)
        inputs = examples.inputs_of(config, self.listing)
        settings = parts.inputs, parts.gradient.microbatch_size, parts.ema_decay
        if settings != (inputs, size, ema_decay(config)):
            raise ValueError("the parts are of another config or data set: build a trainer of it")

    @functools.cached_property
    def dataset(self) -> datasets.Dataset:
        """The data, on the host; if users are protected, see `users.grouped`.

        The first call loads them. It may take minutes if they are features.
        """
        return self.load()

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""

        def first_weights(key: Array) -> tuple[Params, Params]:
            params = finetune.begin(self.parts.model.init(key), self.weights)
            return finetune.split(params, self.config.trainable)

        state = first_state(seed, first_weights, self.parts)
        return devices.replicate(state, self.mesh)

    def training(self, seed: int | None) -> PrivateTraining:
        """A training of the plan, with the clip and the devices of the parts."""
        gradient = self.parts.gradient
        return PrivateTraining(plan=self.plan, clip=gradient.clip, mesh=gradient.mesh, seed=seed)

    def rows(self, indices: np.ndarray, split: datasets.Split | None = None) -> PyTree:
        """The training rows of these numbers on the devices; zeros at `sampling.PADDING`."""
        return examples.rows_at(split or self.dataset.train, indices, self.mesh)

    def batch(
        self, state: TrainState, padded: sampling.PaddedBatch, split: datasets.Split | None = None
    ) -> DrawnBatch:
        """The batch of these rows as the state's next one, for timings and audits.

        It is not drawn, and counts nowhere.
        """
        tag, step = jax.device_get((state.private.tag, state.step))
        rows = self.rows(np.where(padded.mask, padded.indices, sampling.PADDING), split)
        return batch_of(rows, np.asarray(padded.mask), int(step) + 1, tag)

    # Each is the function of `bam.training.step` without its first argument, the parts. A step
    # donates the old state, so the memory need not hold two.
    step = compiled(steps.take, STEP, donate=(0,))
    mean_gradients = compiled(steps.mean_gradients, "measuring gradients")
    diagnose = compiled(steps.diagnose, BIAS)

    @functools.cached_property
    def score_images(self) -> Callable[..., tuple[Array, Array, Array]]:
        """The function of `bam.training.step`, compiled once for all methods."""
        # It takes a few parts alone: all of them would compile it for each method.
        return compiled_once(
            steps.score_images,
            model=self.parts.model,
            criterion=self.criterion,
            prepare=self.parts.inputs.prepare,
            mesh=self.mesh,
        )

    @functools.cached_property
    def fitting(self) -> dict[Callable[..., object], int]:
        """Functions of `bam.training.step` that fit the memory -> their number of rows at once."""
        return {}

    def check_step(self, state: TrainState, keeps_size: bool = False) -> None:
        """Compiles the step without taking it; InputError if it does not fit the memory."""
        nothing = sampling.pad(np.arange(0), self.plan.capacity, 0, 0)
        batch = self.batch(state, nothing)
        self.check_memory(steps.take, STEP, state, batch, donate=(0,), keeps_size=keeps_size)

    def check_diagnostics(self, state: TrainState, rows: PyTree, keeps_size: bool = False) -> None:
        """Compiles the diagnostics; InputError if they do not fit the memory."""
        self.check_memory(steps.diagnose, BIAS, state, rows, keeps_size=keeps_size)

    def check_memory(
        self,
        function: Callable[..., object],
        what: str,
        *args: PyTree,
        donate: tuple[int, ...] = (),
        keeps_size: bool = False,
    ) -> None:
        """InputError if a function of `Parts` does not fit; it names a `microbatch_size` that does.

        The arguments are those of `compiled`, and those of the function without the parts.
        `keeps_size`: the run goes on, so its size cannot be changed, and none is looked for.
        """

        def needs(size: int) -> memory.Needs | None:
            parts = self.parts.with_microbatch_size(size)
            return devices.needs(compiled_once(function, parts, donate=donate), *args)

        size = self.parts.gradient.microbatch_size
        needed = needs(size)
        if needed is None or needed.fits:
            self.fitting[function] = size
            return
        problem = f"{what} with microbatch_size={size} {needed}"
        if keeps_size:
            raise InputError(
                f"{problem}: free some, because a run that goes on keeps its microbatch_size"
            )
        self.log(f"{problem}: looking for a size that fits …")

        def num_bytes_of(size: int) -> int:
            smaller = needs(size)
            return smaller.num_bytes if smaller else 0

        # What is free varies, and the size should still fit when it is tried.
        most = int(SPARE * needed.free)
        fitting, least = memory.largest_size(num_bytes_of, size, needed.num_bytes, most)
        fitting = fitting or int(least <= needed.free)
        if fitting:
            raise InputError(f"{problem}: --config.microbatch_size={fitting} fits")
        one = memory.in_words(needed.num_sharing * least)
        raise InputError(f"{problem}, and a single example takes {one}: {memory.SMALLER}")

    def with_microbatch_size(self, size: int) -> "Trainer":
        """The same run with another number of rows at once, or fewer if 32 bits hold fewer."""
        config = self.config.copy_and_resolve_references()
        check_microbatch_size(size, self.plan.num_examples)
        config.microbatch_size = size
        fitting = fitting_rows(self.plan, self.parts.gradient.clip, size)
        parts = self.parts.with_microbatch_size(fitting)
        return dataclasses.replace(self, config=config, parts=parts)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share rows; None for a single one."""
        return self.parts.gradient.mesh

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, PyTree]:
        """The shapes of the trained and of the frozen parameters."""
        return finetune.split(shapes_of(self.parts.model), self.config.trainable)

    @property
    def num_params(self) -> int:
        """The number of trained scalars."""
        return pytree.num_params(self.shapes[0])

    @property
    def num_frozen(self) -> int:
        """The number of frozen scalars."""
        return pytree.num_params(self.shapes[1])

    @property
    def sensitivity(self) -> float:
        """S of the per-example transform; the noise on the sum has deviation σ·S."""
        return float(self.parts.gradient.clip.sensitivity) if self.plan.private else 0.0

    @property
    def num_devices(self) -> int:
        """The number of devices that share the work."""
        return self.mesh.size if self.mesh else 1

    @property
    def clip_norm(self) -> float:
        """C, the clip norm of the config; `inf` without privacy."""
        return clip_norm_of(self.config, self.plan)

    @property
    def record(self) -> JsonObject:
        """The record in `plan.json` and `summary.json`: the plan, with C and S of the clip."""
        # JSON lacks infinity, which is C without privacy.
        clip_norm = self.clip_norm if self.plan.private else None
        return self.plan.to_json() | {"clip_norm": clip_norm, "sensitivity": self.sensitivity}

    def describe_plan(self) -> str:
        """The plan with the clip and the schedule of the learning rate, in a few lines of text."""
        words = schedules.in_words(parts.schedule_of(self.config.optimizer, self.plan))
        name = self.config.clip.name
        clip = "clip norm" if name == "l2" else f"clip {name} of norm"
        clip += f" {self.clip_norm:.4g}"
        if self.sensitivity != self.clip_norm:
            clip += f", sensitivity {rounded_up(self.sensitivity, '.4g')}"
        plan = self.plan.describe(clip)
        return f"{plan}\nlearning rate: {words}" if words else plan


def ema_decay(config: ConfigDict) -> float | None:
    """None removes the average from the program."""
    return float(config.ema_decay) or None


def clip_norm_of(config: ConfigDict, plan: PrivacyPlan) -> float:
    """Returns C, the clip norm of the config; `inf` without privacy."""
    return float(config.clip_norm) if plan.private else math.inf


def check_microbatch_size(size: object, num_examples: int) -> None:
    """InputError unless `microbatch_size` is an integer from 1 to the number of examples."""
    # `isinstance` would take True for an int, and the key accepts values of any type.
    if type(size) is not int or not 1 <= size <= num_examples:
        raise InputError(
            f"microbatch_size must be from 1 to {num_examples}, the number of training examples, "
            f"got {size}; bam train --config.dry_run --tune finds the fastest"
        )


def shapes_of(model: models.Model) -> PyTree:
    """Returns the shapes of a network's parameters."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))  # traced, so no key is made
