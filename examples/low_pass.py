"""A low-pass filter of the private gradient: the signal changes slowly, the noise does not.

    f_t = κ f_{t−1} + (1 − κ) g_t,   divided by 1 − κ^t

The filter of first order of the source, before Adam without its own momentum or before plain SGD.
It takes the place of momentum: a second filter after it delays the gradient twice, and the weights
swing about the minimum. Beside momentum, Adam's second moment sees the filtered gradient here.

Source: Zhang, Bu, Balle, Hong, Razaviyayn, Mirrokni 2024, "DOPPLER: Differentially Private
Optimizers with Low-pass Filter for Privacy Noise Reduction" (arXiv 2408.13460).

Config: `config.optimizer = ConfigDict({"name": "examples.low_pass:adam", "decay": 0.9,
"learning_rate": 1e-2})`
"""

import optax


def filter(decay):
    """An exponential moving average of the private means, without the bias of its start."""
    return optax.ema(decay, debias=True)


def adam(plan, clip_norm, sensitivity, learning_rate, decay=0.9):
    """Adam of the filtered means, without a momentum of its own."""
    del plan, clip_norm, sensitivity
    return optax.chain(filter(decay), optax.adam(learning_rate, b1=0.0))


def sgd(plan, clip_norm, sensitivity, learning_rate, decay=0.9):
    """Plain steps along the filtered means, which are counted in units of C."""
    del plan, sensitivity
    scaled = optax.scale(1 / clip_norm)
    return optax.chain(filter(decay), scaled, optax.sgd(learning_rate))
