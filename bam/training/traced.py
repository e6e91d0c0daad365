"""What a run's parts make of one example, traced and not computed: faults show before a run."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bam import models
from bam.core import pytree
from bam.core.clipping import BoundedTransformation, finish
from bam.core.noise import first_noise, next_noise
from bam.core.pytree import Grads, Params
from bam.data import datasets
from bam.extras import needs
from bam.models import losses
from bam.privacy.plan import PrivacyPlan
from bam.training import examples, finetune, registry

with needs("train"):
    from ml_collections import ConfigDict


def check(
    config: ConfigDict,
    plan: PrivacyPlan,
    dataset: datasets.Dataset,
    model: models.Model,
    criterion: losses.Loss,
    clip: BoundedTransformation,
) -> None:
    """Raises ValueError for outputs, a loss, gradients or a clip of shapes that do not fit."""
    label = examples.label_of(dataset)
    example = registry.example_like(config, dataset.train.images.shape[-3:], label)
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.eval_shape(model.logits, params, example["image"])
    inputs, like = registry.num_inputs(config), logits.shape[1:-1]
    if logits.shape != (inputs, *like, dataset.num_classes) or like != label.shape[: len(like)]:
        raise ValueError(
            f"model {config.model.name} makes logits {logits.shape} of {inputs} "
            f"inputs: one row of {dataset.num_classes} for each is needed"
        )
    output = jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype)
    if jax.eval_shape(criterion.of_output, output, label).shape:
        raise ValueError(f"loss {config.loss.name} makes no single number of {output.shape}")
    trained, frozen = finetune.split(params, config.trainable)
    gradient = registry.make_gradient(config.method, model.loss)
    grads = jax.eval_shape(gradient, trained, frozen, example)
    if not pytree.same_structure(grads, trained):
        raise ValueError(f"method {config.method.name} gives no gradient like the parameters")

    def private(params: Params, grads: Grads) -> Grads:
        state = clip.init(params)
        return finish(clip, clip.update(grads, state, params)[0], state)[0]

    def drawn(params: Params) -> Array | None:
        state = first_noise(jnp.zeros(8, jnp.uint32), clip, params, plan.mechanism.strategy)
        noise, _ = next_noise(
            state, plan.noise_multiplier, clip.sensitivity, plan.mechanism.strategy
        )
        return noise.drawn

    if plan.private:
        jax.eval_shape(drawn, trained)  # it has room for so many parameters
    if not pytree.same_structure(jax.eval_shape(private, trained, grads), trained):
        raise ValueError(f"clip {config.clip.name} gives no gradient like the parameters")
