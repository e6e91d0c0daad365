"""A low-pass filter of the private gradient: the signal changes slowly, the noise does not.

    f_t = κ f_{t−1} + (1 − κ) g_t,   divided by 1 − κ^t

The filter of first order of the source. An optimizer with momentum filters too, in another place:
here the second moment, too, sees the filtered gradient.

Source: Zhang, Bu, Balle, Hong, Razaviyayn, Mirrokni 2024, "DOPPLER: Differentially Private
Optimizers with Low-pass Filter for Privacy Noise Reduction" (arXiv 2408.13460).

Config: `config.optimizer = ConfigDict({"name": "examples.low_pass:nadam", "decay": 0.9,
"learning_rate": 1e-2})`
"""

import optax


def filter(decay):
    """An exponential moving average of the private means, without the bias of its start."""
    return optax.ema(decay, debias=True)


def nadam(plan, learning_rate, decay=0.9):
    """NAdam of the filtered means."""
    del plan
    return optax.chain(filter(decay), optax.nadam(learning_rate))
