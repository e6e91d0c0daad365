"""Lower bounds on ε from many short runs of the training step, with and without a canary.

The attacker sees every privatised gradient and knows all weights and all data, except whether one
example, the *canary*, took part. They score each run by how much of the canary's clipped gradient
it contains. Scores of runs with and without the canary give confidence bounds on the attacker's
error rates. These give a lower bound on ε, which must not exceed the claimed ε. The canary's
gradient has norm S and a direction that no other example shares. That is the worst case of the
accountant, so at q = 1 a correct implementation has a nearly tight bound.

Some faults of noise and batches leave the scores as they are: `bam.audit.whole_run` looks for them
in real runs. `bam.audit.one_run` audits one training on a user's own data.

Sources: Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning"; Dong, Roth,
Su 2019 for trade-off functions.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from scipy import signal, stats

from bam import waits
from bam.core import sampling
from bam.core.noise import with_new_key
from bam.core.pytree import Grads
from bam.core.seeds import seeded_key
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.privacy import accounting, processes, tradeoff
from bam.training import loop
from bam.training.examples import Rows

with needs("train"):
    from ml_collections import ConfigDict

CANARY = 0  # the canary's row
# The canary's feature. Large, so that hardly any of its gradient lies in the bias, which all
# examples share. Not larger, or an ascent step, in a direction of noise, could fit the canary and
# leave a gradient shorter than C.
CANARY_VALUE = 20.0
# The range of σ that a bound is searched in. More noise cannot be measured. With less noise PLD's
# tables grow too long, and ε is so large already that a tighter bound says nothing new.
MOST_NOISE, LEAST_NOISE = 256.0, 0.5


class Audit(NamedTuple):
    """Lower bounds on ε from scores, with the upper confidence bounds on the error rates.

    Attributes:
      epsilon_lower: the bound for a mechanism with the trade-off function of the Poisson-sampled
        Gaussian for some σ. The error rates rule out every smaller ε.
      epsilon_lower_any: the bound for any mechanism, from the (ε, δ) inequalities alone. At small δ
        it is far from tight, unless there are some 1/δ trials.
      false_positive_rate: upper bound on the rate of accusing a run without the canary.
      false_negative_rate: upper bound on the rate of missing the canary.
    """

    epsilon_lower: float
    epsilon_lower_any: float
    false_positive_rate: float
    false_negative_rate: float


def canary_dataset(
    num_examples: int, num_classes: int = 4, num_features: int = 4, canary_size: int = 1
) -> datasets.Dataset:
    """Returns a data set of N examples for a linear model, with the canary in the first row.

    Only the canary's first feature is not zero. The `test` split is the training split without the
    canary, with a row of zeros in its place. If `canary_size` is above 1, the canary is that many
    equal examples, the first rows.
    """
    rng = np.random.default_rng(0)
    images = rng.normal(size=(num_examples, 1, 1, num_features)).astype(np.float32)
    images[..., 0] = 0
    images[:canary_size] = 0
    labels = rng.integers(num_classes, size=num_examples).astype(np.int32)
    labels[:canary_size] = labels[CANARY]
    without = datasets.Split(images.copy(), labels)
    images[:canary_size, ..., 0] = CANARY_VALUE
    zeros, ones = np.zeros(num_features, np.float32), np.ones(num_features, np.float32)
    split = datasets.Split(images, labels)
    return datasets.Dataset("canary", split, without, num_classes, zeros, ones)


def users_dataset(num_users: int, examples_each: int) -> datasets.Dataset:
    """Returns a data set like that of `canary_dataset`, with `examples_each` examples per user.

    The first user is the canary.
    """
    dataset = canary_dataset(num_users * examples_each, canary_size=examples_each)
    return dataset._replace(users=np.repeat(np.arange(num_users), examples_each))


def scores(
    config: ConfigDict,
    num_examples: int,
    num_trials: int,
    first_seed: int = 0,
    canary_size: int = 1,
    log: waits.Log = lambda line: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of runs of the training step with and without the canary, `[num_trials]` each.

    Every trial starts from the same weights with its own seed, and takes the planned steps with the
    sampler, oracle, clip, noise and optimizer of `training/loop.py`. The score is the mean over the
    steps of ⟨privatised sum, canary's clipped gradient⟩ / S². A step with the canary has a value
    near 1, one without it near 0.

    Args:
      config: a config with a linear model. Only `group_size` is read of its `dataset` section.
      num_examples: N, with the canary. If `group_size` is k > 0, N users of `canary_size` examples.
        At most k examples of a user are used, and the canary is a user.
      num_trials: number of runs with, and of runs without, the canary.
      first_seed: seed of the first run.
      canary_size: number of the canary's examples. Without users, more than one shows how much a
        run that protects single examples reveals about a person with several.
      log: called with lines about the progress.
    """
    size = config.dataset.group_size
    if size:
        dataset = users_dataset(num_examples, canary_size)
    else:
        dataset = canary_dataset(num_examples, canary_size=canary_size)
    built = loop.build(config, dataset)
    plan = built.plan
    absent_split = users.group_by_user(dataset._replace(train=dataset.test), size).train
    canary_rows = 1 if size else canary_size  # a user is one row
    with_canary, without = built.place_rows(), Rows(absent_split, plan, built.mesh)
    start, canary = built.init(0), built.rows(np.array([CANARY]))
    # A step donates its state's buffers, so each trial gets a copy.
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))

    @jax.jit
    def score(private_grad: Grads, clipped: Grads) -> Float[Array, ""]:
        total = plan.expected_batch_size * optax.tree.vdot(private_grad, clipped)
        return total / built.sensitivity**2

    def one_trial(seed: int, present: bool) -> float:
        state, private = copy(start), start.private
        noise = private.privatize.noise
        noise = with_new_key(noise, processes.put(seeded_key(seed), noise.key.sharding))
        private = copy(private._replace(privatize=private.privatize._replace(noise=noise)))
        state = state._replace(private=private)
        step_scores = []
        for step in range(1, plan.num_steps + 1):
            clipped = built.mean_gradients(state, canary)[0].clipped
            indices = plan.mechanism.draw(seed, step)
            if not present:  # leaves the draws of all other examples as they are
                indices = indices[indices >= CANARY + canary_rows]
            padded = sampling.pad(indices, plan.capacity, seed, step).within(num_examples)
            batch = built.batch(state, padded, with_canary if present else without)
            state = built.step(state, batch)
            step_scores.append(score(state.private.previous, clipped))
        # Correlated noise is C⁻¹ z. The attacker knows the strategy C and applies it, which leaves
        # the independent noise z. Without correlation C is the identity.
        fresh = signal.lfilter(plan.mechanism.strategy, [1.0], jax.device_get(step_scores))
        return float(np.mean(fresh))

    score_of = np.zeros((2, num_trials))  # with the canary, and without
    with waits.awaited(log, f"{2 * num_trials:,} runs, half of them with the canary") as wait:
        for number, (absent, trial) in enumerate(np.ndindex(score_of.shape)):
            wait.share = number / score_of.size
            seed = first_seed + 2 * trial + absent
            score_of[absent, trial] = one_trial(seed, present=not absent)
    return score_of[0], score_of[1]


def lower_bound(
    present: np.ndarray,
    absent: np.ndarray,
    *,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    confidence: float = 0.95,
) -> Audit:
    """Lower bounds on ε at δ from scores, which hold with the stated confidence.

    The threshold is chosen on the first fifth of the scores. On the other scores, Clopper-Pearson
    bounds on the two error rates hold together with the stated confidence. A score that is NaN, as
    of a run that diverged, is no evidence: it counts as a wrong guess.

    Args:
      present: scores of at least 50 runs with the canary; higher means more of it.
      absent: scores of at least 50 runs without it.
      sampling_prob: q of the mechanism.
      num_steps: T of the mechanism.
      delta: δ of the bounds.
      confidence: probability that both bounds hold.

    Raises:
      InputError: for fewer scores, or a confidence outside (0, 1).
    """
    if min(len(present), len(absent)) < 50:
        raise InputError("an audit needs at least 50 scores with and 50 without the canary")
    if not 0 < confidence < 1:
        raise InputError(f"--confidence={confidence} must be between 0 and 1, such as 0.95")
    # A threshold chosen on the scores that it is tested on would overstate ε.
    num_held_out = len(present) // 5, len(absent) // 5
    threshold = _best_threshold(present[: num_held_out[0]], absent[: num_held_out[1]])
    missed = _misses(present[num_held_out[0] :], threshold)
    alarmed = _false_alarms(absent[num_held_out[1] :], threshold)
    level = 1 - (1 - confidence) / 2  # a union bound over the two rates
    false_negative, false_positive = (_upper(errors, level) for errors in (missed, alarmed))
    any_mechanism = max(
        _log_ratio(1 - delta - false_negative, false_positive),
        _log_ratio(1 - delta - false_positive, false_negative),
    )

    def is_allowed(f: tradeoff.Tradeoff) -> bool:
        """Whether a mechanism with trade-off function f may have error rates this low."""
        return float(f(np.array([false_positive]))[0]) <= false_negative

    spent = epsilon_ruled_out(is_allowed, sampling_prob, num_steps, delta)
    return Audit(spent, max(0.0, any_mechanism), false_positive, false_negative)


def epsilon_ruled_out(
    is_allowed: Callable[[tradeoff.Tradeoff], bool],
    sampling_prob: float,
    num_steps: int,
    delta: float,
) -> float:
    """A lower bound on ε: that of the Poisson-sampled Gaussian with the least σ that is ruled out.

    `is_allowed` tells whether a mechanism with a trade-off function may show what was observed. A σ
    is ruled out if neither it nor any larger σ, up to `MOST_NOISE`, is allowed. 0 if none is.
    """

    def is_possible(sigma: float) -> bool:
        return is_allowed(_tradeoff(sigma, sampling_prob, num_steps))

    sigma = MOST_NOISE
    if is_possible(sigma):
        return 0.0
    while sigma > LEAST_NOISE and not is_possible(sigma / 2):
        sigma /= 2
    # `sigma` is ruled out; `low` is allowed, or untried below `LEAST_NOISE`. Bisect between them.
    low = sigma / 2
    for _ in range(12 if sigma > LEAST_NOISE else 0):
        middle = math.sqrt(low * sigma)
        low, sigma = (middle, sigma) if is_possible(middle) else (low, middle)
    return _epsilon(sigma, sampling_prob, num_steps, delta)


def _tradeoff(sigma: float, sampling_prob: float, num_steps: int) -> tradeoff.Tradeoff:
    """The trade-off function of T steps of the Poisson-sampled Gaussian."""
    if sampling_prob == 1:
        return tradeoff.gaussian_tradeoff(math.sqrt(num_steps) / sigma)
    if num_steps == 1:
        return tradeoff.subsampled_tradeoff(tradeoff.gaussian_tradeoff(1 / sigma), sampling_prob)
    return accounting.poisson_tradeoff(
        noise_multiplier=sigma, sampling_prob=sampling_prob, num_steps=num_steps, up_to=20.0
    )


def _epsilon(sigma: float, sampling_prob: float, num_steps: int, delta: float) -> float:
    """Returns ε of T steps of the Poisson-sampled Gaussian.

    It is exact without sampling.
    """
    if sampling_prob == 1:
        return tradeoff.epsilon_of_mu(math.sqrt(num_steps) / sigma, delta)
    return accounting.epsilon(
        noise_multiplier=sigma, sampling_prob=sampling_prob, num_steps=num_steps, delta=delta
    )


def _best_threshold(present: np.ndarray, absent: np.ndarray) -> float:
    """The threshold whose upper bounds on the error rates give the largest μ of Gaussian DP."""

    def separation(threshold: float) -> float:
        missed = _upper(_misses(present, threshold), 0.95)
        alarmed = _upper(_false_alarms(absent, threshold), 0.95)
        return float(-stats.norm.ppf(missed) - stats.norm.ppf(alarmed))

    scores = np.concatenate([present, absent])
    # Between scores that are not finite there is no threshold; all of them may be such.
    scores = np.append(scores[np.isfinite(scores)], [] if np.isfinite(scores).any() else [0.0])
    candidates = np.quantile(scores, np.linspace(0.02, 0.98, 97))
    return max((float(c) for c in candidates), key=separation)


def _misses(present: np.ndarray, threshold: float) -> np.ndarray:
    return ~(present > threshold)  # true of NaN, too


def _false_alarms(absent: np.ndarray, threshold: float) -> np.ndarray:
    return ~(absent <= threshold)


def _upper(errors: np.ndarray, level: float) -> float:
    """Clopper-Pearson upper bound on an error rate."""
    count = int(np.sum(errors))
    if count == len(errors):
        return 1.0
    return float(stats.beta.ppf(level, count + 1, len(errors) - count))


def _log_ratio(numerator: float, denominator: float) -> float:
    return math.log(numerator / denominator) if numerator > 0 else 0.0
