"""Accounting of batches by random allocation: each example in one batch of every epoch."""

import dataclasses
import functools
import math

import dp_accounting

from bam.errors import InputError
from bam.extras import needs
from bam.privacy import accounting

# Spacing of the tables of privacy losses, as a share of the ε of Poisson batches: the bound is
# above the truth by about as much, or less. TRUNCATION of δ is left out on the safe side.
SPACING, TRUNCATION = 0.025, 0.01


@dataclasses.dataclass(frozen=True)
class AllocatedGaussianDpEvent(dp_accounting.DpEvent):
    """T Gaussians on batches that are drawn by the epoch of b; dp-accounting has no such event."""

    noise_multiplier: float
    batches_per_epoch: int
    num_steps: int


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
      InputError: if an argument is out of range. MissingExtraError without `PLD_accounting`.

    Source: Feldman and Shenfeld 2026, arXiv 2602.17284.

    Examples:
      >>> settings = dict(noise_multiplier=2.0, num_steps=120, delta=1e-5)
      >>> allocated = epsilon_of_random_allocation(batches_per_epoch=12, **settings)
      >>> poisson = accounting.epsilon(sampling_prob=1 / 12, **settings)
      >>> round(allocated, 1), round(poisson, 1)
      (2.0, 2.1)
    """
    if batches_per_epoch < 2:
        raise InputError(f"batches_per_epoch must be at least 2, got {batches_per_epoch}")
    accounting.check_mechanism(0.0, num_steps, delta, "pld")
    accounting.check_noise_multiplier(noise_multiplier)
    if num_steps == 0 or math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    epochs = -(-num_steps // batches_per_epoch)
    return cached_epsilon(noise_multiplier, batches_per_epoch, epochs, delta)


def settings(sigma: float, batches: int, epochs: int, delta: float) -> tuple[float, float]:
    """The spacing and the truncation that ε is computed with."""
    poisson = accounting.epsilon(
        noise_multiplier=sigma,
        sampling_prob=1 / batches,
        num_steps=batches * epochs,
        delta=delta,
        accountant="rdp",
    )
    return SPACING * poisson, TRUNCATION * delta


@functools.lru_cache(maxsize=64)  # every step of an epoch asks for the same
def cached_epsilon(sigma: float, batches: int, epochs: int, delta: float) -> float:
    """ε of so many epochs, of numbers that are already checked."""
    with needs("allocation"):
        import numba  # noqa: F401  # without it, it would take half a minute
        import PLD_accounting as allocation

    spacing, truncation = settings(sigma, batches, epochs, delta)
    params = allocation.PrivacyParams(
        sigma=sigma, num_steps=batches, num_epochs=epochs, delta=delta
    )
    how = allocation.AllocationSchemeConfig(loss_discretization=spacing, tail_truncation=truncation)
    return float(allocation.gaussian_allocation_epsilon_configurable(params=params, config=how))
