"""DiSK: a simplified Kalman filter of the gradients over steps. For plain SGD.

An example's gradient is taken at the weights and a little ahead of them, along the last step of
length η ‖g_{t−1}‖. The released mean moves a running mean:

    d_t = −η g_{t−1},   g_i = a ∇L_i(θ_t + γ d_t) + (1 − a) ∇L_i(θ_t),   a = (1 − κ) / (κ γ)
    ĝ_t = (1/l) (Σ clip(g_i) + noise),   g_t = (1 − κ) g_{t−1} + κ ĝ_t,   g_{−1} = 0

g is computed from released means, so it costs no privacy. Use the two parts below together, with
the same kappa. A step computes two gradients per example.

Source: Zhang et al. 2025, "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for
Noise Reduction" (arXiv 2410.03883), Algorithm 1, with η g in place of θ_t − θ_{t−1}: the same for
SGD without momentum.

Config: `name_part(config, "method", "examples.disk:oracle", kappa=0.7, gamma=0.5,
learning_rate=config.optimizer.learning_rate)` and
`name_part(config, "clip", "examples.disk:clip", kappa=0.7)`
"""

import jax
import optax

import bam


def oracle(loss_fn, kappa, gamma, learning_rate):
    """Mixes gradients at the weights and ahead of them.

    `learning_rate` is η of the optimizer. The optimizer must be SGD, whose gradient is g.
    """
    kappa, gamma, learning_rate = float(kappa), float(gamma), float(learning_rate)
    if not (0 < kappa <= 1 and gamma > 0):
        raise ValueError(f"kappa must be in (0, 1] and gamma above 0, got {kappa} and {gamma}")
    ahead = (1 - kappa) / (kappa * gamma)

    def ascend(params, previous):
        move = lambda p, g: (p - gamma * learning_rate * g).astype(p.dtype)  # noqa: E731
        return params, jax.tree.map(move, params, previous)

    def grad(params_at, example):
        current, later = (jax.grad(loss_fn)(params, example) for params in params_at)
        return optax.tree.add(optax.tree.scale(ahead, later), optax.tree.scale(1 - ahead, current))

    return bam.Oracle(ascend, grad)


def clip(plan, clip_norm, kappa):
    """Clips at C, and releases the running mean in each step."""
    kappa, to_norm = float(kappa), bam.clip_by_l2_norm(clip_norm)

    def update(grads, running, params=None):
        return to_norm.update(grads, None)[0], running

    def finish(mean, running):
        running = jax.tree.map(lambda r, m: (1 - kappa) * r + kappa * m, running, mean)
        return running, running

    return bam.BoundedTransformation(optax.tree.zeros_like, update, clip_norm, finish)
