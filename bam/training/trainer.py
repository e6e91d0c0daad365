"""From a config to a `Trainer`: its values are checked, its privacy planned and its parts made."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from bam import memory, models, waits
from bam.core import oracles, pytree, sampling, strategy
from bam.core.clipping import Bounded, finish
from bam.core.noise import advance_noise, fitting_size, init_noise
from bam.core.privatize import NoisedMean
from bam.core.program import compiled_once
from bam.core.pytree import Grads, Params
from bam.core.tracing import being_traced
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.models.normalisation import Normalisation
from bam.privacy.plan import Population, PrivacyPlan, check_same, make_plan
from bam.privacy.rounding import rounded_up
from bam.training import devices, examples, loading, methods, parts, schedules
from bam.training import step as steps
from bam.training.config import check
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
      dataset: the data, on the host; if users are protected, see `users.grouped`.
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
    dataset: datasets.Dataset
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
        if (parts.mean, parts.is_private) != (_mean(plan), plan.private):
            raise ValueError("the parts have the noise of another plan: build it with plan=PLAN")
        size = _microbatch_size(config.microbatch_size, plan, parts.clip)
        inputs = examples.inputs_of(config, self.dataset)
        settings = parts.inputs, parts.microbatch_size, parts.ema_decay
        if settings != (inputs, size, _ema_decay(config)):
            raise ValueError("the parts are of another config or data set: build a trainer of it")

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""

        def first_weights(key: Array) -> tuple[Params, Params]:
            params = finetune.begin(self.parts.model.init(key), self.weights)
            return finetune.split(params, self.config.trainable)

        state = first_state(seed, first_weights, self.parts)
        return devices.replicate(state, self.parts.mesh)

    def place(self, split: datasets.Split) -> datasets.Split:
        """Puts a split on the devices, in the form that the functions below read."""
        # Flat rows: a TPU would copy images of four axes into another layout in every step.
        rows = split._replace(images=split.images.reshape(len(split.images), -1))
        # A streamed split is a batch, and each device gets only its rows. Any device may read any
        # row of data in memory, so each gets all.
        share = devices.share_rows if self.parts.inputs.streams else devices.replicate
        return share(rows, self.parts.mesh)

    # Each is the function of `bam.training.step` without its first argument, the parts. A step
    # donates the old state, so the memory need not hold two.
    step = compiled(steps.take, STEP, donate=(0,))
    means = compiled(steps.means, "measuring gradients")
    diagnose = compiled(steps.diagnose, BIAS)

    @functools.cached_property
    def evaluate(self) -> Callable[..., tuple[Array, Array, Array]]:
        """The function of `bam.training.step`, compiled once for all methods."""
        # It takes a few parts alone: all of them would compile it for each method.
        return compiled_once(
            steps.evaluate,
            model=self.parts.model,
            criterion=self.criterion,
            prepare=self.parts.inputs.prepare,
            mesh=self.parts.mesh,
        )

    @functools.cached_property
    def fitting(self) -> dict[Callable[..., object], int]:
        """Functions of `bam.training.step` that fit the memory -> their number of rows at once."""
        return {}

    def check_step(
        self,
        state: TrainState,
        train: datasets.Split,
        batch: sampling.PaddedBatch,
        keeps_size: bool = False,
    ) -> None:
        """Compiles the step without taking it; InputError if it does not fit the memory."""
        args = state, train, batch
        self.check_memory(steps.take, STEP, *args, donate=(0,), keeps_size=keeps_size)

    def check_diagnostics(
        self, state: TrainState, train: datasets.Split, rows: np.ndarray, keeps_size: bool = False
    ) -> None:
        """Compiles the diagnostics; InputError if they do not fit the memory."""
        self.check_memory(steps.diagnose, BIAS, state, train, rows, keeps_size=keeps_size)

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
            parts = dataclasses.replace(self.parts, microbatch_size=size)
            return devices.needs(compiled_once(function, parts, donate=donate), *args)

        size, needed = self.parts.microbatch_size, needs(self.parts.microbatch_size)
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
        check_microbatch_size(size, _num_examples(config, self.dataset))
        config.microbatch_size = size
        fitting = _microbatch_size(size, self.plan, self.parts.clip)
        parts = dataclasses.replace(self.parts, microbatch_size=fitting)
        return dataclasses.replace(self, config=config, parts=parts)

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, PyTree]:
        """The shapes of the trained and of the frozen parameters."""
        return finetune.split(_shapes(self.parts.model), self.config.trainable)

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
        return float(self.parts.clip.sensitivity) if self.plan.private else 0.0

    @property
    def num_devices(self) -> int:
        """The number of devices that share the work."""
        return self.parts.mesh.size if self.parts.mesh else 1

    @property
    def clip_norm(self) -> float:
        """C, the clip norm of the config; `inf` without privacy."""
        return _clip_norm(self.config, self.plan)

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


def build(
    config: ConfigDict,
    dataset: datasets.Dataset | None = None,
    hardware: Sequence[jax.Device] | None = None,
    log: Callable[[str], None] = lambda line: None,
    plan: PrivacyPlan | None = None,
    on_plan: Callable[[Trainer], None] = lambda trainer: None,
) -> Trainer:
    """Checks a config, loads its data, plans its privacy and makes its parts.

    It compiles no step: the functions of the trainer are compiled on their first call.

    Args:
      config: from `bam/training/config.py`.
      dataset: data in memory, in place of the config's `dataset` and `features` sections.
      hardware: devices to share the work; None takes all visible ones. For devices that are not
        there, the functions can be compiled but not run.
      log: called with a line on long waits.
      plan: the plan of the run to continue, from `rundir.recorded_plan`; None makes one.
      on_plan: called with the run as soon as it is planned. If its data are features of images,
        they are still blank, because computing them may take minutes.

    Raises:
      InputError: for a value out of range, or a plan of another config or other data; the message
        names the remedy.
    """
    # Before the data, because reading them may take minutes.
    check(config)
    check_labels = parts.make_loss(config.loss).check

    def rows_of(dataset: datasets.Dataset) -> tuple[datasets.Dataset, Normalisation | None]:
        datasets.check(dataset, check_labels)
        dataset, expected = loading.normalised(config, dataset)
        return users.grouped(dataset, config.dataset.group_size), expected

    if dataset is None:
        listed, mapped = loading.listed(config.dataset, config.features, log)
    else:
        listed, mapped = dataset, lambda: listed
    with waits.awaited(log, "planning", stays=False):
        trainer = _planned_trainer(config, *rows_of(listed), hardware, plan, log)
    on_plan(trainer)
    data = mapped()
    # No part depends on the values of features, so only the data are exchanged.
    return trainer if data is listed else dataclasses.replace(trainer, dataset=rows_of(data)[0])


def _planned_trainer(
    config: ConfigDict,
    dataset: datasets.Dataset,
    expected: Normalisation | None,
    hardware: Sequence[jax.Device] | None,
    plan: PrivacyPlan | None,
    log: Callable[[str], None],
) -> Trainer:
    """The trainer of a run; only the number, shapes and labels of the data are read."""
    shape, num_examples = dataset.train.images.shape[-3:], _num_examples(config, dataset)
    config = config.copy_and_resolve_references()
    check_microbatch_size(config.microbatch_size, num_examples)
    criterion, model, loss = _network(config, dataset.num_classes, shape)
    # The method sees the loss alone: it knows neither batches nor clips nor noise.
    oracle = parts.make_oracle(config.method, loss)
    _check_shapes(config, dataset, criterion, model, oracle)
    # The plan is made without the clip: σ and ε do not depend on C.
    plan = _planned(config, num_examples, plan)
    trained, _ = finetune.split(_shapes(model), config.trainable)
    clip_norm = _clip_norm(config, plan)
    clip = parts.make_clip(config.clip, plan, clip_norm)
    # A user's clip may return another tree, or its S may be too large for floats to hold the noise.
    _check_clip(config.clip.name, clip, plan, trained)
    sensitivity = clip.sensitivity if plan.private else 0.0
    return Trainer(
        config=config,
        dataset=dataset,
        plan=plan,
        parts=steps.Parts(
            oracle=oracle,
            clip=clip,
            optimizer=parts.make_optimizer(config.optimizer, plan, clip_norm, sensitivity),
            mean=_mean(plan),
            ema_decay=_ema_decay(config),
            noise_norm=strategy.norm(strategy.noise_of(plan.mechanism.strategy, plan.num_steps)),
            is_private=plan.private,
            loss=loss,
            model=model,
            inputs=examples.inputs_of(config, dataset),
            microbatch_size=_microbatch_size(config.microbatch_size, plan, clip),
            mesh=devices.mesh(devices.visible() if hardware is None else hardware),
        ),
        criterion=criterion,
        weights=finetune.load(config.init_from, config.init_fresh, _shapes(model), shape),
        features_digest=loading.features_digest(config.features),
        normalisation=expected,
        log=log,
    )


def _ema_decay(config: ConfigDict) -> float | None:
    """None removes the average from the program."""
    return float(config.ema_decay) or None


def _mean(plan: PrivacyPlan) -> NoisedMean:
    return NoisedMean(plan.noise_multiplier, plan.expected_batch_size, plan.mechanism.strategy)


def _microbatch_size(size: int, plan: PrivacyPlan, clip: Bounded) -> int:
    """The microbatch size as asked, or a smaller one if 32 bits cannot hold the sum."""
    if not plan.private:
        return size
    return fitting_size(size, plan.noise_multiplier, float(clip.sensitivity), plan.capacity)


def _network(
    config: ConfigDict, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    """The criterion of outputs, the network, and the loss of an example.

    For bam's models and losses, equal sections give the same objects, so that runs share compiled
    programs.
    """
    # A user's function may return another network for the same options, so it is called each time.
    if ":" in config.model.name + config.loss.name:
        return _new_network(config, num_classes, tuple(shape))
    names, values = ("model", "loss", "lora", "convolution", "precision"), config.to_dict()
    sections = {name: values[name] for name in names}
    text = json.dumps(sections, default=lambda x: np.asarray(x).tolist())
    return _made_network(text, num_classes, tuple(shape))


@functools.lru_cache(maxsize=32)
def _made_network(
    sections: str, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    return _new_network(ConfigDict(json.loads(sections)), num_classes, shape)


def _new_network(
    config: ConfigDict, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    criterion = parts.make_loss(config.loss)
    model = models.as_functions(
        parts.make_model(config.model, num_classes),
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


def _clip_norm(config: ConfigDict, plan: PrivacyPlan) -> float:
    return float(config.clip_norm) if plan.private else math.inf


def check_microbatch_size(size: object, num_examples: int) -> None:
    """InputError unless `microbatch_size` is an integer from 1 to the number of examples."""
    # `isinstance` would take True for an int, and the key accepts values of any type.
    if type(size) is not int or not 1 <= size <= num_examples:
        raise InputError(
            f"microbatch_size must be from 1 to {num_examples}, the number of training examples, "
            f"got {size}; bam train --config.dry_run --tune finds the fastest"
        )


def _num_examples(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """N: the config's number, or the number of training examples or users if it is not set.

    InputError if the config's number is smaller than that.
    """
    num_rows, public_number = len(dataset.train.labels), config.num_examples
    if public_number is not None and public_number < num_rows:
        unit = "users" if config.dataset.group_size else "training examples"
        raise InputError(
            f"num_examples is {public_number}, but there are {num_rows} {unit} (NOT PRIVATE): set "
            "--config.num_examples to a larger number that is public, or leave some out of the data"
        )
    return num_rows if public_number is None else int(public_number)


def _check_shapes(
    config: ConfigDict,
    dataset: datasets.Dataset,
    criterion: losses.Loss,
    model: models.Model,
    oracle: oracles.Method,
) -> None:
    """InputError if the shapes of outputs, loss or gradients do not fit together.

    The functions are traced and not run, so a mistake shows at once and not in the first step.
    """
    params = _shapes(model)
    for name, x in zip(pytree.names(params), jax.tree.leaves(params), strict=True):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise InputError(
                f"model {config.model.name} has a parameter {x.dtype}{list(x.shape)} at {name}: "
                "make it float32 or bfloat16, and leave jax_enable_x64 off"
            )
    label = examples.label_of(dataset)
    example = examples.example_like(config, dataset.train.images.shape[-3:], label)
    logits = jax.eval_shape(model.logits, params, example["image"])
    inputs, like = examples.num_inputs(config), logits.shape[1:-1]
    if logits.shape != (inputs, *like, dataset.num_classes) or like != label.shape[: len(like)]:
        raise InputError(
            f"model {config.model.name} returns logits {logits.shape} for {inputs} "
            f"inputs: one row of {dataset.num_classes} for each is needed"
        )
    output = jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype)
    if jax.eval_shape(criterion.of_output, output, label).shape:
        raise InputError(
            f"loss {config.loss.name} does not return a single number for an output of shape "
            f"{output.shape}"
        )
    trained, frozen = finetune.split(params, config.trainable)

    def gradient(params: Params, example: PyTree) -> Grads:
        return oracle.grad(oracle.ascend(params, optax.tree.zeros_like(params)), example)

    grads = jax.eval_shape(gradient, trained, example | {"frozen": frozen})
    if not pytree.same_structure(grads, trained):
        raise InputError(
            f"method {config.method.name} returns a gradient of another structure, shape or dtype "
            "than the parameters"
        )


def _check_clip(name: str, clip: Bounded, plan: PrivacyPlan, trained: PyTree) -> None:
    """InputError if the clip or its noise does not fit the trained parameters."""

    def clipped(params: Params) -> Grads:
        state = clip.init(params)
        return finish(clip, clip.update(params, state, params)[0], state)[0]

    def correlated(params: Params) -> Array | None:
        strategy = plan.mechanism.strategy
        # Any key will do: the noise is traced, not drawn.
        state = init_noise(jnp.zeros(8, jnp.uint32), clip, params, strategy)
        noise, _ = advance_noise(state, plan.noise_multiplier, clip.sensitivity, strategy)
        return noise.correlated

    if plan.private:
        jax.eval_shape(correlated, trained)  # raises if floats cannot hold the noise
    if not pytree.same_structure(jax.eval_shape(clipped, trained), trained):
        raise InputError(
            f"clip {name} returns a gradient of another structure, shape or dtype than the "
            "parameters"
        )


def _shapes(model: models.Model) -> PyTree:
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))  # traced, so no key is made


def _planned(config: ConfigDict, num_examples: int, recorded: PrivacyPlan | None) -> PrivacyPlan:
    """The plan of a run: a new one, or the recorded one with its recorded σ and ε.

    InputError, in one line, if the recorded plan differs from config and data in anything else.
    """
    private = methods.is_private(config.method.name)
    # An epoch has N // l steps on average, because q = l/N.
    training_steps = config.num_steps or config.num_epochs * (
        num_examples // config.expected_batch_size
    )
    settings: JsonObject = {
        "expected_batch_size": config.expected_batch_size,
        "num_steps": training_steps + config.spare_steps,
        "delta": config.delta,
        "accountant": config.accountant,
    }
    population = Population(
        num_examples,
        group_size=config.dataset.group_size,
        num_examples_given=config.num_examples is not None,
    )
    mechanism = parts.set_keys(config.mechanism, "")
    plan = recorded or make_plan(
        num_examples=population,
        target_epsilon=config.epsilon if private else math.inf,
        mechanism=mechanism,
        **settings,
    )
    settings |= {"population": population, "mechanism_config": mechanism}
    settings |= {} if private else {"noise_multiplier": 0.0, "epsilon": math.inf}
    # The recorded σ and ε with the config's other numbers: they must give the recorded plan.
    current = dataclasses.replace(plan, spare_steps=config.spare_steps, **settings)
    if recorded is None:
        return current
    if private:
        # Another version of the accountant may have chosen this σ; its ε must still hold.
        recorded.check_target(config.epsilon)
    check_same("the workdir", recorded.to_json(), current.to_json())
    return recorded
