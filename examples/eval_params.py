"""Optimizers that are evaluated, and released, at other weights than they step from.

Lookahead (Zhang, Lucas, Hinton, Ba 2019, arXiv 1907.08610) moves slow weights towards the fast ones
after every k steps, and continues from there. Schedule-free SGD (Defazio et al. 2024, arXiv
2405.15682) evaluates an average of its weights. Both are post-processing of the private gradients.

Config: `name_part(config, "optimizer", "examples.eval_params:lookahead", learning_rate=0.1)`
"""

import jax
import jax.numpy as jnp
import optax

from bam.training.parts import EvaluatedOptimizer


def lookahead(plan, clip_norm, sensitivity, learning_rate, period=5, share=0.5):
    """SGD on means divided by C, whose slow weights follow by a share after every period."""
    del plan, sensitivity
    fast = optax.chain(optax.scale(1 / clip_norm), optax.sgd(learning_rate))

    def init(params):
        return fast.init(params), params, jnp.int32(0)

    def update(grads, state, params):
        fast_state, slow, step = state
        updates, fast_state = fast.update(grads, fast_state, params)
        is_due = (step + 1) % period == 0
        # The fast weights after this step, and where both go if the period ends.
        ahead = optax.apply_updates(params, updates)
        moved = optax.incremental_update(ahead, slow, share)
        slow = jax.tree.map(lambda x, y: jnp.where(is_due, x, y), moved, slow)
        updates = jax.tree.map(lambda u, m, x: jnp.where(is_due, m - x, u), updates, moved, params)
        return updates, (fast_state, slow, step + 1)

    return EvaluatedOptimizer(init, update, lambda state, params: state[1])


def schedule_free(plan, clip_norm, sensitivity, learning_rate, b1=0.9):
    """Schedule-free SGD on means divided by C."""
    del plan, sensitivity
    base = optax.chain(optax.scale(1 / clip_norm), optax.sgd(learning_rate))
    optimizer = optax.contrib.schedule_free(base, learning_rate, b1)
    return EvaluatedOptimizer(*optimizer, optax.contrib.schedule_free_eval_params)
