"""Checks, by tracing them, that the parts of a run fit together."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bam import models, named
from bam.core import oracles, pytree
from bam.core.clipping import Bounded, finish
from bam.core.noise import advance_noise, init_noise
from bam.core.pytree import Grads, Params
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.models import finetune, losses
from bam.privacy.plan import PrivacyPlan
from bam.training import examples
from bam.training.parts import AnyOptimizer
from bam.training.trainer import shapes_of

with needs("train"):
    from ml_collections import ConfigDict


def check_shapes(
    config: ConfigDict,
    dataset: datasets.Dataset,
    criterion: losses.Loss,
    model: models.Model,
    oracle: oracles.Method,
) -> None:
    """Raises InputError if the shapes of outputs, loss or gradients do not fit together.

    The functions are traced and not run, so a mistake shows at once and not in the first step.
    """
    params = shapes_of(model)
    for name, x in zip(pytree.names(params), jax.tree.leaves(params), strict=True):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise InputError(
                f"model {config.model.name} has a parameter {x.dtype}{list(x.shape)} at {name}: "
                "make it float32 or bfloat16, and leave jax_enable_x64 off"
            )
    label = examples.label_of(dataset)
    example = examples.example_like(config, dataset.train.images.shape[-3:], label)
    with named.refused_by(f"model {config.model.name}"):
        logits = jax.eval_shape(model.logits, params, example["image"])
    inputs, like = examples.num_inputs(config), logits.shape[1:-1]
    if logits.shape != (inputs, *like, dataset.num_classes) or like != label.shape[: len(like)]:
        raise InputError(
            f"model {config.model.name} returns logits {logits.shape} for {inputs} "
            f"inputs: one row of {dataset.num_classes} for each is needed"
        )
    output = jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype)
    with named.refused_by(f"loss {config.loss.name}"):
        loss = jax.eval_shape(criterion.of_output, output, label)
    if jax.tree.map(jnp.shape, loss) != ():
        raise InputError(
            f"loss {config.loss.name} does not return a single number for an output of shape "
            f"{output.shape}"
        )
    trained, frozen = finetune.split(params, config.trainable)

    def gradient(params: Params, example: PyTree) -> Grads:
        return oracle.grad(oracle.ascend(params, optax.tree.zeros_like(params)), example)

    used = (f"{name} {config[name].name}" for name in ("method", "model", "loss"))
    with named.refused_by(*used):
        grads = jax.eval_shape(gradient, trained, example | {"frozen": frozen})
    if not pytree.same_structure(grads, trained):
        raise InputError(
            f"method {config.method.name} returns a gradient of another structure, shape or dtype "
            "than the parameters"
        )


def check_clip(name: str, clip: Bounded, plan: PrivacyPlan, trained: PyTree) -> None:
    """Raises InputError if the clip or its noise does not fit the trained parameters."""

    def clip_gradient(params: Params) -> Grads:
        state = clip.init(params)
        return finish(clip, clip.update(params, state, params)[0], state)[0]

    def correlate(params: Params) -> Array | None:
        strategy = plan.mechanism.strategy
        # Any key will do: the noise is traced, not drawn.
        state = init_noise(jnp.zeros(8, jnp.uint32), clip, params, strategy)
        noise, _ = advance_noise(state, plan.noise_multiplier, clip.sensitivity, strategy)
        return noise.correlated

    if plan.private:
        jax.eval_shape(correlate, trained)  # raises if floats cannot hold the noise
    with named.refused_by(f"clip {name}"):
        returned = jax.eval_shape(clip_gradient, trained)
    if not pytree.same_structure(returned, trained):
        raise InputError(
            f"clip {name} returns a gradient of another structure, shape or dtype than the "
            "parameters"
        )


def check_optimizer(name: str, optimizer: AnyOptimizer, trained: PyTree) -> None:
    """Raises InputError if the optimizer does not take the parameters, or returns another tree."""

    def update(params: Params) -> tuple[PyTree, PyTree]:
        # The private gradient is float32 or wider, whatever the parameters are.
        grads = jax.tree.map(pytree.at_least_float32, params)
        return optimizer.update(grads, optimizer.init(params), params)

    with named.refused_by(f"optimizer {name}"):
        state = jax.eval_shape(optimizer.init, trained)
    is_lookahead = lambda x: isinstance(x, optax.LookaheadState)  # noqa: E731
    if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
        raise InputError(
            f"optimizer {name} is optax.lookahead, which needs two sets of weights, and a run has "
            "one: leave lookahead out; --config.ema_decay averages the weights"
        )
    with named.refused_by(f"optimizer {name}"):
        updates, _ = jax.eval_shape(update, trained)
    leaves, structures = zip(*map(jax.tree.flatten, (updates, trained)), strict=True)
    shapes = [list(map(jnp.shape, x)) for x in leaves]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise InputError(
            f"optimizer {name} returns updates of another structure or shape than the parameters"
        )
