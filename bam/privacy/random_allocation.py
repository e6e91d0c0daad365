"""Accounting of batches by random allocation: each example in one batch of every epoch."""

import functools
import math
import warnings
from types import ModuleType

from bam.extras import needs
from bam.privacy import accounting, pld

# Spacings of the table of an epoch's privacy loss: the first, and the least, after it is chosen as
# a share of the ε that the first gave. ε holds at any of them.
COARSE, LEAST, SHARE = 1e-2, 1e-4, 1e-3
TRUNCATION = 1e-3  # of δ, what of the probability the tables leave out on the safe side


def epsilon_of_random_allocation(
    *, noise_multiplier: float, batches_per_epoch: int, num_steps: int, delta: float
) -> float:
    r"""ε of T Gaussians whose batches are drawn by the epoch, by `PLD_accounting`, from above.

    In an epoch of b steps each example is in the batch of just one, any of them equally likely, and
    independently of all others and of other epochs. Seen from an example that is added or removed,
    an epoch shows $N(S e_J, \sigma^2 S^2 I)$, J uniform on b, in place of $N(0, \sigma^2 S^2 I)$.
    Steps after the last whole epoch count as an epoch: leaving some out shows less.

    Args:
      noise_multiplier: σ ≥ 0.
      batches_per_epoch: b ≥ 2.
      num_steps: T ≥ 0.
      delta: δ in (0, 1).

    Raises:
      ValueError: if an argument is out of range. MissingExtraError without `PLD_accounting`.

    Source: Feldman and Shenfeld 2026, arXiv 2602.17284.

    Examples:
      >>> settings = dict(noise_multiplier=2.0, num_steps=120, delta=1e-5)
      >>> allocated = epsilon_of_random_allocation(batches_per_epoch=12, **settings)
      >>> poisson = accounting.epsilon(sampling_prob=1 / 12, **settings)
      >>> round(allocated, 2), round(poisson, 2)
      (1.94, 2.1)
    """
    if batches_per_epoch < 2:
        raise ValueError(f"batches_per_epoch must be at least 2, got {batches_per_epoch}")
    accounting.check_mechanism(0.0, num_steps, delta, "pld")
    accounting.check_noise_multiplier(noise_multiplier)
    if num_steps == 0 or math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    run = noise_multiplier, batches_per_epoch, -(-num_steps // batches_per_epoch), delta
    found = _epsilon(*run, COARSE)
    finer = max(LEAST, SHARE * found)
    return min(found, _epsilon(*run, finer)) if finer < COARSE else found


def package() -> ModuleType:
    """`PLD_accounting`, which warns that it would use numba: not for what is used of it here."""
    with needs("allocation"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)
        import PLD_accounting
    return PLD_accounting


@functools.lru_cache(maxsize=64)  # every step of an epoch asks for the same
def _epsilon(sigma: float, batches: int, epochs: int, delta: float, spacing: float) -> float:
    allocation = package()
    params = allocation.PrivacyParams(sigma=sigma, num_steps=batches, num_epochs=epochs)
    how = allocation.AllocationSchemeConfig(
        loss_discretization=spacing,
        tail_truncation=TRUNCATION * delta,
        convolution_method=allocation.ConvolutionMethod.FFT,
    )
    dominating = allocation.gaussian_allocation_pld(params=params, config=how)
    rounding = pld.ROUNDING * batches * epochs  # of Fourier transforms
    return float(dominating.get_epsilon_for_delta(delta - rounding))
