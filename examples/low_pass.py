"""A low-pass filter of the private gradient: the signal changes slowly, the noise does not.

    f_t = κ f_{t−1} + (1 − κ) g_t,   divided by 1 − κ^t

The filter of first order of the source. An optimizer with momentum filters too, in another place:
here the second moment, too, sees the filtered gradient.

Source: Zhang, Bu, Balle, Hong, Razaviyayn, Mirrokni 2024, "DOPPLER: Differentially Private
Optimizers with Low-pass Filter for Privacy Noise Reduction" (arXiv 2408.13460).

Config: `config.after_noise = ConfigDict({"name": "examples.low_pass:filter", "decay": 0.9})`
"""

import optax


def filter(plan, decay=0.9):
    """An exponential moving average of the private means, without the bias of its start."""
    del plan
    return optax.ema(decay, debias=True)
