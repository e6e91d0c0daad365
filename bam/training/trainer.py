"""A run as one thing: everything a config says, checked, planned and made, once each."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Num, PyTree

from bam import models
from bam.core import oracles, pytree, sampling, strategy
from bam.core.clipping import BoundedTransformation, finish
from bam.core.engine import plain_sum
from bam.core.noise import first_noise, next_noise
from bam.core.privatize import NoisedMean, PrivatizeState, private_mean
from bam.core.pytree import Grads, Params
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.privacy.plan import Population, PrivacyPlan, check_same, make_plan
from bam.training import devices, diagnostics, examples, loading, methods, parts
from bam.training.config import check
from bam.training.step import TrainState, descend, first_state, step_key

with needs("train"):
    from ml_collections import ConfigDict

Output = TypeVar("Output")
DENSE = "xla"  # convolutions that are fastest where no example has a gradient of its own


def compiled(
    method: Callable[..., Output], *, donate: tuple[int, ...] = ()
) -> functools.cached_property[Callable[..., Output]]:
    """A method that is compiled once for each object, when it is first called.

    `donate` are those arguments, counted without `self`, whose memory the result may take.
    """

    def bound(self: object) -> Callable[..., Output]:
        return jax.jit(functools.partial(method, self), donate_argnums=donate)

    return functools.cached_property(bound)


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """A run's settings and parts, and the functions that they make; it serves any number of seeds.

    Attributes:
      config: the configuration it was built from.
      dataset: the data, on the host; of users, see `users.grouped`.
      plan: the privacy plan of a run.
      criterion: the loss of an image, and how outputs are judged.
      model: the network as functions of its parameters, for per-example gradients.
      loss: that of an example as a function of the trained parameters; it has the `frozen` ones.
      oracle: the method, of that loss.
      clip: the per-example transform; of a run that is not private one that bounds nothing.
      optimizer: what follows the noise.
      weights: those that training begins from, if they are not random.
      features_digest: SHA-256 of the weights that features were made with; "": of none.
      mesh: the devices that share the work, see `bam.training.devices`; None for a single one.
      audited_step: what is taken in the place of `step`, by whoever watches or breaks a run; None:
        nothing.
    """

    config: ConfigDict
    dataset: datasets.Dataset
    plan: PrivacyPlan
    criterion: losses.Loss
    model: models.Model
    loss: oracles.LossFn
    oracle: oracles.Oracle
    clip: BoundedTransformation
    optimizer: optax.GradientTransformation
    weights: finetune.Weights
    features_digest: str
    mesh: jax.sharding.Mesh | None
    audited_step: Callable[..., TrainState] | None = None

    def take_step(
        self, state: TrainState, train: datasets.Split, batch: sampling.PaddedBatch
    ) -> TrainState:
        """A step of a run: `step`, unless an audit has another in its place."""
        return (self.audited_step or self.step)(state, train, batch)

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""

        def first_weights(key: Array) -> tuple[Params, Params]:
            begun = finetune.begin(self.model.init(key), self.weights)
            return finetune.split(begun, self.config.trainable)

        noise_strategy = self.plan.mechanism.strategy
        state = first_state(seed, first_weights, self.optimizer, self.clip, noise_strategy)
        return devices.replicate(state, self.mesh)

    def place(self, split: datasets.Split) -> datasets.Split:
        """A split on the devices, as the functions below read it."""
        # A row of numbers for each image: of four axes, a TPU would lay out all anew in every step.
        rows = split._replace(images=split.images.reshape(len(split.images), -1))
        # Of data that are streamed it is a batch, of which each device is given its rows alone.
        share = devices.share_rows if datasets.streams(self.dataset) else devices.replicate
        return share(rows, self.mesh)

    @functools.partial(compiled, donate=(0,))
    def step(
        self, state: TrainState, train: datasets.Split, batch: sampling.PaddedBatch
    ) -> TrainState:
        """One step, of a train split on the devices: Algorithm 2 of arXiv 2308.12018.

        The sum of bounded gradients, with noise of deviation σ·S, is divided by the plan's l, which
        is public. Without privacy it is the sum of gradients over l, of the same batches. Of data
        that are streamed the split holds the batch's rows, in their order. It does not check the
        plan: the loop does.
        """
        oracle, example_at = self.oracle, self._example_at(state, train)
        rows = examples.rows(self.dataset, train, batch.indices)
        sharing: JsonObject = {"mask": jnp.asarray(batch.mask), **self._sharing}
        plan, strategy = self.plan, self.plan.mechanism.strategy
        if plan.private:
            gradient, norms, after = private_mean(
                lambda params, row: oracle.grad(params, example_at(row)),
                self.clip,
                oracle.ascend(state.params, state.private_grad),
                rows,
                PrivatizeState(state.clip, state.noise),
                NoisedMean(plan.noise_multiplier, plan.expected_batch_size, strategy),
                **sharing,
            )
            num_nonfinite = state.num_nonfinite + jnp.sum(~jnp.isfinite(norms))
            state = state._replace(num_nonfinite=num_nonfinite, **after._asdict())
        else:
            total = plain_sum(
                lambda params, row: self.loss(params, example_at(row)),
                state.params,
                rows,
                **sharing,
            )
            gradient = jax.tree.map(lambda x: x / self.plan.expected_batch_size, total)
        # From here on everything is post-processing of the private gradient.
        return descend(state, gradient, self.optimizer, self.config.ema_decay)

    @compiled
    def evaluate(
        self,
        params: Params,
        images: Num[Array | np.ndarray, "n h w c"],
        labels: Num[Array | np.ndarray, "n ..."],
    ) -> tuple[Array, Array, Float[Array, "n ..."]]:
        """The number of images classified correctly, the sum of their losses, and the outputs.

        An image whose loss is not finite is not classified correctly, whatever its outputs are.
        The parameters are those of the whole model, `finetune.merge(state.averaged, state.frozen)`.
        """
        inputs = datasets.prepare(self.dataset, images, self.config.input_clip_norm)
        outputs = self.model.logits(params, inputs, DENSE)
        right = self.criterion.right or (lambda output, label: jnp.zeros(()))
        losses, is_right = (
            jax.vmap(f)(outputs, jnp.asarray(labels)) for f in (self.criterion.of_output, right)
        )
        finite = jnp.isfinite(losses) & jnp.isfinite(is_right)
        num_right = jnp.sum(jnp.where(finite, is_right, 0))
        if self.mesh:  # all rows in every process
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
        return num_right, jnp.sum(losses), outputs

    @compiled
    def means(
        self, state: TrainState, train: datasets.Split, indices: Array | np.ndarray
    ) -> tuple[diagnostics.Means, diagnostics.Means]:
        """Means over training examples of the method's gradients, and of plain ones. NOT PRIVATE.

        The train split is on the devices; `indices` are its rows. Of data that are streamed it
        holds these rows alone.
        """
        example_at = self._example_at(state, train)

        def means_of(oracle: oracles.Oracle) -> diagnostics.Means:
            return diagnostics.means(
                lambda params, row: oracle.grad(params, example_at(row)),
                self.clip,
                oracle.ascend(state.params, state.private_grad),
                examples.rows(self.dataset, train, indices),
                clip_state=state.clip,
                **self._sharing,
            )

        own = means_of(self.oracle)
        if methods.is_plain(self.config.method.name):
            return own, own
        return own, means_of(oracles.dp_sgd(self.loss))

    @compiled
    def diagnose(
        self, state: TrainState, train: datasets.Split, indices: Array | np.ndarray
    ) -> dict[str, Float[Array, ""]]:
        """What `diagnostics.describe` says of `means`, and `plain/loss`, the loss. NOT PRIVATE."""
        own, plain = self.means(state, train, indices)
        example_at = self._example_at(state, train)
        params = finetune.merge(state.params, state.frozen)
        losses = jax.lax.map(
            lambda row: self.model.loss(params, example_at(row), DENSE),
            examples.rows(self.dataset, train, indices),
            batch_size=self.config.microbatch_size,
        )
        plan = self.plan
        noise_std = plan.noise_multiplier * self.sensitivity / plan.expected_batch_size
        noise_std *= strategy.norm(strategy.noise_of(plan.mechanism.strategy, plan.num_steps))
        measured = diagnostics.describe(own, plain, state.private_grad, noise_std)
        return measured | {"plain/loss": jnp.mean(losses)}

    def _example_at(self, state: TrainState, train: datasets.Split) -> Callable[[PyTree], PyTree]:
        """Makes an example of a row, so that only a microbatch of views exists at a time."""
        at = examples.example_at(self.config, self.dataset, train, state.step)
        key = step_key(state)
        return lambda row: at(key, row) | {"frozen": state.frozen}

    @property
    def _sharing(self) -> JsonObject:
        return {"microbatch_size": self.config.microbatch_size, "mesh": self.mesh}

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, PyTree]:
        """Shapes of the parameters, of the trained and of the frozen ones."""
        return finetune.split(_shapes(self.model), self.config.trainable)

    @property
    def num_params(self) -> int:
        """Number of trained numbers."""
        return pytree.num_params(self.shapes[0])

    @property
    def num_frozen(self) -> int:
        """Number of those that are not trained."""
        return pytree.num_params(self.shapes[1])

    @property
    def sensitivity(self) -> float:
        """S of the per-example transform: the noise on the sum has deviation σ·S."""
        return self.clip.sensitivity if self.plan.private else 0.0

    @property
    def clip_norm(self) -> float:
        """C, which the clip was made of; `inf` of a run that is not private."""
        return _clip_norm(self.config, self.plan)

    @property
    def record(self) -> JsonObject:
        """What `plan.json` and `summary.json` say of privacy: the plan, and C and S of the clip."""
        clip_norm = self.clip_norm if self.plan.private else None
        return self.plan.to_json() | {"clip_norm": clip_norm, "sensitivity": self.sensitivity}

    def describe_plan(self) -> str:
        """The plan with C, in a few lines of plain text, for people."""
        return self.plan.describe(f"clip norm {self.clip_norm:.4g}")


def build(
    config: ConfigDict,
    dataset: datasets.Dataset | None = None,
    hardware: Sequence[jax.Device] | None = None,
    log: Callable[[str], None] = lambda line: None,
    plan: PrivacyPlan | None = None,
) -> Trainer:
    """Checks a config, loads its data, plans its privacy and makes its parts.

    It compiles nothing: the functions are compiled when they are first called.

    Args:
      config: as `bam/training/config.py` makes it.
      dataset: data in memory, instead of what the config's `dataset` and `features` sections name.
      hardware: devices to share the work; None: all that are visible. The functions can be
        compiled, not run, for devices that are not there.
      log: called with a line on what takes time.
      plan: that of the run to go on with, `rundir.recorded_plan`; None: it is made of the config.

    Raises:
      InputError: for any value that cannot be, or a plan that is not of this config and data; the
        message names the fix.
    """
    check(config)
    if dataset is None:
        dataset = loading.make_dataset(config.dataset, config.features, log)
    criterion = parts.make_loss(config.loss)
    datasets.check(dataset, criterion.check)
    dataset = users.grouped(dataset, config.dataset.group_size)
    shape, num_examples = dataset.train.images.shape[-3:], _num_examples(config, dataset)
    config = config.copy_and_resolve_references()
    check_microbatch_size(config.microbatch_size, num_examples)
    module = parts.make_model(config.model, dataset.num_classes)
    model = models.as_functions(
        module,
        shape,
        convolution=config.convolution,
        precision=config.precision,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
        loss=criterion,
    )

    def loss(params: Params, example: PyTree) -> Float[Array, ""]:
        return model.loss(finetune.merge(params, example["frozen"]), example)

    oracle = parts.make_oracle(config.method, loss)
    _check_shapes(config, dataset, criterion, model, oracle)
    plan = _planned(config, num_examples, plan)
    trained, _ = finetune.split(_shapes(model), config.trainable)
    clip_norm = _clip_norm(config, plan)
    clip = parts.make_clip(config.clip, plan, clip_norm)
    _check_clip(config.clip.name, clip, plan, trained)
    sensitivity = clip.sensitivity if plan.private else 0.0
    return Trainer(
        config=config,
        dataset=dataset,
        plan=plan,
        criterion=criterion,
        model=model,
        loss=loss,
        oracle=oracle,
        clip=clip,
        optimizer=parts.make_optimizer(config.optimizer, plan, clip_norm, sensitivity),
        weights=finetune.load(config.init_from, config.init_fresh, _shapes(model)),
        features_digest=loading.features_digest(config.features),
        mesh=devices.mesh(devices.visible() if hardware is None else hardware),
    )


def _clip_norm(config: ConfigDict, plan: PrivacyPlan) -> float:
    return float(config.clip_norm) if plan.private else math.inf


def check_microbatch_size(size: object, num_examples: int) -> None:
    """Raises InputError for what cannot be a config's `microbatch_size`."""
    if type(size) is not int or not 1 <= size <= num_examples:
        raise InputError(
            f"microbatch_size {size} must be from 1 to the number of training examples, "
            f"{num_examples}; bam train --config.dry_run --tune times which is fastest"
        )


def _num_examples(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """N: the config's, which must cover all training examples, or users; else their number."""
    counted, given = len(dataset.train.labels), config.num_examples
    if given is not None and given < counted:
        many = "users" if config.dataset.group_size else "training examples"
        raise InputError(
            f"num_examples is {given}, but there are {counted} {many} (NOT PRIVATE): set a larger "
            "number that is public, or leave some out of the data"
        )
    return counted if given is None else int(given)


def _check_shapes(
    config: ConfigDict,
    dataset: datasets.Dataset,
    criterion: losses.Loss,
    model: models.Model,
    oracle: oracles.Oracle,
) -> None:
    """Raises InputError for outputs, a loss or gradients of shapes that do not fit.

    Everything is traced and nothing computed, so faults show before a run.
    """
    params = _shapes(model)
    for name, x in zip(pytree.names(params), jax.tree.leaves(params), strict=True):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise InputError(
                f"model {config.model.name} has a parameter {x.dtype}{list(x.shape)} at {name}: "
                "float32 or bfloat16 is needed, and JAX without 64 bits"
            )
    label = examples.label_of(dataset)
    example = examples.example_like(config, dataset.train.images.shape[-3:], label)
    logits = jax.eval_shape(model.logits, params, example["image"])
    inputs, like = examples.num_inputs(config), logits.shape[1:-1]
    if logits.shape != (inputs, *like, dataset.num_classes) or like != label.shape[: len(like)]:
        raise InputError(
            f"model {config.model.name} makes logits {logits.shape} of {inputs} "
            f"inputs: one row of {dataset.num_classes} for each is needed"
        )
    output = jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype)
    if jax.eval_shape(criterion.of_output, output, label).shape:
        raise InputError(f"loss {config.loss.name} makes no single number of {output.shape}")
    trained, frozen = finetune.split(params, config.trainable)

    def gradient(params: Params, example: PyTree) -> Grads:
        return oracle.grad(oracle.ascend(params, optax.tree.zeros_like(params)), example)

    grads = jax.eval_shape(gradient, trained, example | {"frozen": frozen})
    if not pytree.same_structure(grads, trained):
        raise InputError(f"method {config.method.name} gives no gradient like the parameters")


def _check_clip(name: str, clip: BoundedTransformation, plan: PrivacyPlan, trained: PyTree) -> None:
    """InputError for a clip that, or whose noise, does not fit the trained parameters."""

    def clipped(params: Params) -> Grads:
        state = clip.init(params)
        return finish(clip, clip.update(params, state, params)[0], state)[0]

    def drawn(params: Params) -> Array | None:
        correlated = plan.mechanism.strategy
        state = first_noise(jnp.zeros(8, jnp.uint32), clip, params, correlated)
        return next_noise(state, plan.noise_multiplier, clip.sensitivity, correlated)[0].drawn

    if plan.private:
        jax.eval_shape(drawn, trained)  # floats hold it, and it has room for so many parameters
    if not pytree.same_structure(jax.eval_shape(clipped, trained), trained):
        raise InputError(f"clip {name} gives no gradient like the parameters")


def _shapes(model: models.Model) -> PyTree:
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))  # a key is no computation then


def _planned(config: ConfigDict, num_examples: int, recorded: PrivacyPlan | None) -> PrivacyPlan:
    """The plan of a run: made of the config, or the recorded one, with its own σ and ε.

    InputError, in one line, if any other fact of that is not the config's and the data's.
    """
    private = methods.is_private(config.method.name)
    training_steps = config.num_steps or config.num_epochs * (
        num_examples // config.expected_batch_size
    )
    facts: JsonObject = {
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
        **facts,
    )
    facts |= {"population": population, "mechanism_config": mechanism}
    facts |= {} if private else {"noise_multiplier": 0.0, "epsilon": math.inf}
    asked = dataclasses.replace(plan, spare_steps=config.spare_steps, **facts)
    if recorded is None:
        return asked
    if private:
        recorded.check_target(config.epsilon)
    check_same("the workdir", recorded.to_json(), asked.to_json())
    return recorded
