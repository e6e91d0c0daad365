"""The check of a mechanism: how batches are drawn and noise is correlated."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import signal

from bam.core import clipping, sampling
from bam.core import strategy as strategies
from bam.core.gaussian import GaussianNoise
from bam.core.noise import NoiseState, advance_noise, init_noise
from bam.core.seeds import seeded_key
from bam.privacy import accounting
from bam.privacy.mechanisms import Mechanism
from bam.testing.common import require

NUM_ENTRIES = 4000  # of a sum, for the covariance
DEVIATIONS = 6  # that a covariance may be off by
NUM_STEPS = 40


def check_mechanism(make: Callable[[int, int], Mechanism]) -> None:
    """Checks that a mechanism draws and correlates as its record says.

    `make` is a function of N and l, which is called with 1000 and 50.

    * batches are sorted rows of the data, each at most once; a seed and step give the same again,
      and another seed or step another (unless a batch is all of the data);
    * no example is twice within as many steps as the strategy has numbers; without that, noise that
      takes earlier noise back shows the earlier gradient;
    * the noise that `advance_noise` makes of the strategy has the covariance that it declares:
      $C n$ is independent, with deviation σ·S, over steps and entries;
    * ε is 0 for no step, grows with the steps, falls with σ, and `noise_multiplier` is enough; the
      noise of its event, if that is of Poisson-sampled Gaussians, is σ over the strategy's norm.

    What it cannot show is that ε is right.
    """
    num_examples, batch_size = 1000, 50
    mechanism = make(num_examples, batch_size)
    _check_batches(mechanism, num_examples)
    _check_noise(mechanism.strategy)
    delta = 1e-6
    accountant = next((a for a in ("rdp", "pld") if _has(mechanism, a)), "")
    require(bool(accountant), "it has an ε by neither accountant, pld nor rdp")

    def epsilon(sigma: float, num_steps: int) -> float:
        return mechanism.epsilon(
            noise_multiplier=sigma, num_steps=num_steps, delta=delta, accountant=accountant
        )

    if steps := accounting.poisson_steps(mechanism.event(2.0, NUM_STEPS)):
        hidden = steps.noise_multiplier * strategies.norm(mechanism.strategy)
        require(math.isclose(hidden, 2.0, rel_tol=1e-9), "its event has another noise than σ/‖c‖")
    require(epsilon(2.0, 0) == 0, "ε of no step is not 0")
    over_steps = [epsilon(2.0, num_steps) for num_steps in (1, 10, NUM_STEPS)]
    require(over_steps == sorted(over_steps) and over_steps[0] > 0, "ε does not grow with steps")
    require(epsilon(4.0, NUM_STEPS) < over_steps[-1], "ε does not fall with the noise")
    sigma = mechanism.noise_multiplier(
        target_epsilon=1.0, num_steps=NUM_STEPS, delta=delta, accountant=accountant
    )
    require(epsilon(sigma, NUM_STEPS) <= 1.0, "its noise_multiplier is too small for its own ε")


def _has(mechanism: Mechanism, accountant: str) -> bool:
    try:
        found = mechanism.epsilon(
            noise_multiplier=2.0, num_steps=1, delta=1e-6, accountant=accountant
        )
    except ValueError:
        return False
    return math.isfinite(found)


def _check_batches(mechanism: Mechanism, num_examples: int) -> None:
    members = np.zeros((NUM_STEPS, num_examples), bool)
    for step in range(1, NUM_STEPS + 1):
        drawn = np.asarray(mechanism.draw(7, step))
        again = np.asarray(mechanism.draw(7, step))
        require(np.array_equal(drawn, again), "one seed and step give two batches")
        require(
            np.array_equal(drawn, np.unique(drawn)) and set(drawn) <= set(range(num_examples)),
            "a batch is not of sorted, different rows of the data",
        )
        members[step - 1, drawn] = True
    if not members.all():
        require(len(np.unique(members, axis=0)) > 1, "all steps have the same batch")
        other = np.asarray(mechanism.draw(8, 1))
        require(not np.array_equal(other, np.flatnonzero(members[0])), "the seed does not matter")
    bands = len(mechanism.strategy)
    require(
        sampling.are_separated(members, bands),
        f"its noise is correlated over {bands} steps, but it draws an example twice within them",
    )


def _check_noise(strategy: tuple[float, ...]) -> None:
    """The covariance of the noise that the loop would add, in units of what is declared."""
    clip, sigma = clipping.clip_by_l2_norm(1.0), 2.0
    state = init_noise(seeded_key(0), clip, jnp.zeros(NUM_ENTRIES), strategy)

    @jax.jit
    def step(state: NoiseState) -> tuple[GaussianNoise, Array, NoiseState]:
        noise, state = advance_noise(state, sigma, clip.sensitivity, strategy)
        return noise, noise.draws_of_device(NUM_ENTRIES)[:NUM_ENTRIES], state

    rows = []
    for _ in range(NUM_STEPS):
        noise, drawn, state = step(state)
        rows.append(np.asarray(drawn) * noise.spacing / sigma)
    fresh = signal.lfilter(strategy, [1.0], np.array(rows), axis=0)
    covariance = fresh @ fresh.T / NUM_ENTRIES
    off = np.abs(covariance - np.eye(NUM_STEPS)) * math.sqrt(NUM_ENTRIES / 2)
    require(
        bool(np.all(off < DEVIATIONS)),
        f"its noise has another covariance than its strategy {strategy[:4]} declares",
    )
