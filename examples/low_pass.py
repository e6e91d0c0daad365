"""A low-pass filter of the private gradient: the signal changes slowly, the noise does not.

    f_t = κ f_{t−1} + (1 − κ) g_t,   divided by 1 − κ^t

This is the source's filter of first order, before plain SGD or before Adam without momentum. It
replaces momentum, because a second filter delays the gradient twice, and the weights oscillate
about the minimum. Adam's second moment also sees the filtered gradient here.

Source: Zhang, Bu, Balle, Hong, Razaviyayn, Mirrokni 2024, "DOPPLER: Differentially Private
Optimizers with Low-pass Filter for Privacy Noise Reduction" (arXiv 2408.13460).

Config: `name_part(config, "optimizer", "examples.low_pass:adam", decay=0.9, learning_rate=1e-2)`
"""

import optax


def filter(decay):
    """An exponential moving average of the private means, corrected for its start at zero."""
    return optax.ema(decay, debias=True)


def adam(plan, clip_norm, sensitivity, learning_rate, decay=0.9):
    """Adam on the filtered means, without momentum."""
    del plan, clip_norm, sensitivity
    return optax.chain(filter(decay), optax.adam(learning_rate, b1=0.0))


def sgd(plan, clip_norm, sensitivity, learning_rate, decay=0.9):
    """SGD on the filtered means, divided by C."""
    del plan, sensitivity
    scaled = optax.scale(1 / clip_norm)
    return optax.chain(filter(decay), scaled, optax.sgd(learning_rate))
