"""Batches by random allocation, where each example is in one batch of every epoch, and their ε."""

import dataclasses
import functools
import math

from bam.core import sampling
from bam.errors import InputError
from bam.extras import needs
from bam.privacy import accounting
from bam.privacy.mechanisms import BY, Mechanism, OwnEvent, counts

# Spacing of the tables of privacy losses, as a share of the ε of Poisson batches. The bound exceeds
# the truth by about that much or less. The share TRUNCATION of δ is left out, on the safe side.
SPACING, TRUNCATION = 0.025, 0.01


def random_allocation(num_examples: int, batch_size: int) -> Mechanism:
    """Each example is in one batch of every epoch of b = ⌊N/l⌋ steps, at random.

    The batch is drawn anew in each epoch, independently of the other examples, so batch sizes vary
    around N/b. ε is mostly smaller than with Poisson batches. It needs the extra `allocation`.
    """
    num_examples, batch_size = counts(num_examples, batch_size)
    batches = num_examples // batch_size
    if batches < 2:
        raise InputError(
            f"mechanism random_allocation needs two batches an epoch: expected_batch_size must be "
            f"at most {num_examples // 2}, got {batch_size}"
        )
    return Mechanism(
        sampling_prob=1 / batches,
        batches=f"random allocation: each {{unit}} in one of the {batches} batches of every epoch",
        sampling=f"random allocation: in every epoch of {batches} steps each {{unit}} is in the "
        f"batch of one, any of them equally likely and independently of others and of other "
        f"epochs, {BY}",
        draw=lambda seed, step: sampling.allocated_sample(seed, step, num_examples, batches),
        capacity=functools.partial(sampling.usual_capacity, num_examples, 1 / batches),
        event=lambda sigma, num_steps: AllocatedGaussianDpEvent(sigma, batches, num_steps),
        period=batches,
    )


@dataclasses.dataclass(frozen=True)
class AllocatedGaussianDpEvent(OwnEvent):
    """T Gaussian steps on batches drawn by epochs of b.

    dp-accounting has no such event.
    """

    noise_multiplier: float
    batches_per_epoch: int
    num_steps: int

    def epsilon(self, delta: float, accountant: str) -> float:
        """Returns ε of these steps.

        InputError for an accountant other than PLD, because only PLD bounds it.
        """
        if accountant != "pld":
            raise InputError(
                f"accountant {accountant} has no bound for random_allocation batches: pld has"
            )
        return epsilon_of_random_allocation(delta=delta, **vars(self))

    def least_noise(self, target_epsilon: float, delta: float, accountant: str) -> float:
        """Returns the smallest σ of these steps, to a relative 1e-3 of ε."""
        accounting.check_search(target_epsilon, 1 / self.batches_per_epoch, self.num_steps)

        def spent(sigma: float) -> float:
            event = dataclasses.replace(self, noise_multiplier=sigma)
            return event.epsilon(delta, accountant)

        return accounting.least_noise(spent, target_epsilon, near=1.0, tolerance=1e-3)


def epsilon_of_random_allocation(
    *, noise_multiplier: float, batches_per_epoch: int, num_steps: int, delta: float
) -> float:
    r"""Returns an upper bound on ε of T Gaussian steps with random allocation, by `PLD_accounting`.

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
    accounting.check_steps(0.0, num_steps, delta, "pld")
    accounting.check_noise_multiplier(noise_multiplier)
    if num_steps == 0 or math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    epochs = -(-num_steps // batches_per_epoch)  # an unfinished epoch counts as a whole one
    return cached_epsilon(noise_multiplier, batches_per_epoch, epochs, delta)


def settings(sigma: float, batches: int, epochs: int, delta: float) -> tuple[float, float]:
    """Returns the spacing and the truncation that ε is computed with."""
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
    """Returns ε of so many epochs, of numbers that are already checked."""
    with needs("allocation"):
        import numba  # noqa: F401  # without it, it would take half a minute
        import PLD_accounting as allocation

    spacing, truncation = settings(sigma, batches, epochs, delta)
    params = allocation.PrivacyParams(
        sigma=sigma, num_steps=batches, num_epochs=epochs, delta=delta
    )
    scheme = allocation.AllocationSchemeConfig(
        loss_discretization=spacing, tail_truncation=truncation
    )
    return float(allocation.gaussian_allocation_epsilon_configurable(params=params, config=scheme))
