"""What the code that trains gives away: lower bounds on ε from many short runs.

An attacker who sees every privatised gradient, and knows all weights and all data but for whether
one *canary* took part, scores each run by how much of the canary's clipped gradient it contains.
From runs with and without the canary follow confidence bounds on the attacker's error rates, and
from those a lower bound on ε, which must not exceed the claimed ε. The canary's gradient has norm
S and a direction no other example shares, the worst case that the accountant assumes, so a correct
implementation at q = 1 is nearly tight.

What a score cannot see, of noise and of batches, `bam.audit.whole_run` looks for in real runs, and
`bam.audit.one_run` audits a run of one's own.

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
from bam.core import processes, sampling
from bam.core.noise import with_new_key
from bam.core.pytree import Grads
from bam.core.seeds import seeded_key
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.privacy import accounting, tradeoff
from bam.training import trainer

with needs("train"):
    from ml_collections import ConfigDict

CANARY = 0  # its row
# Large, so that hardly any of its gradient lies in the bias, which all examples share; not so large
# that an ascent step, in a direction of noise, could fit it and leave a gradient shorter than C.
CANARY_VALUE = 20.0
# Between these a lower bound is sought: with more noise nothing is measurable, with less PLD's
# tables grow too long, and a bound of that size says enough.
MOST_NOISE, LEAST_NOISE = 256.0, 0.5


class Audit(NamedTuple):
    """Lower bounds on ε from scores, and upper confidence bounds of the error rates behind them.

    Attributes:
      epsilon_lower: of a mechanism whose trade-off function is that of the Poisson-sampled Gaussian
        for some σ: the largest ε that the error rates rule out everything below.
      epsilon_lower_any: of any mechanism, from the (ε, δ) inequalities alone; far from tight at
        small δ, where it would take 1/δ trials to be.
    """

    epsilon_lower: float
    epsilon_lower_any: float
    false_positive_rate: float
    false_negative_rate: float


def canary_dataset(
    num_examples: int, num_classes: int = 4, num_features: int = 4, canary_size: int = 1
) -> datasets.Dataset:
    """N examples of which the first is the canary: the only one whose first feature is not zero.

    For a linear model. Its `test` split is the training split without the canary: a row of zeros
    stands in its place. A canary of several examples, all alike, is the first `canary_size` rows.
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
    """As `canary_dataset`, of users with so many examples each: the first *user* is the canary."""
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

    Every trial takes the planned steps with the sampler, oracle, clip, noise and optimizer that
    `training/loop.py` uses, from the same initial weights, two seeds to a pair. Its score is the
    mean over the steps of ⟨privatised sum, canary's clipped gradient⟩ / S², which is near 1 for a
    step in which the canary took part and near 0 otherwise.

    The config is of a linear model; of its `dataset` section only `group_size` is read. N counts
    the canary. If that is k > 0, the canary is a whole user: N users have `canary_size` examples
    each, or k of them. Without users a `canary_size` above 1 shows what somebody with so many
    examples is given away by a run that protects single ones.
    """
    size = config.dataset.group_size
    if size:
        dataset = users_dataset(num_examples, canary_size)
    else:
        dataset = canary_dataset(num_examples, canary_size=canary_size)
    built = trainer.build(config, dataset)
    plan = built.plan
    others = users.grouped(dataset._replace(train=dataset.test), size).train
    rows = 1 if size else canary_size
    with_canary, without = (built.place(split) for split in (built.dataset.train, others))
    start = built.init(0)
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))  # a step takes its state's memory

    @jax.jit
    def score(private_grad: Grads, clipped: Grads) -> Float[Array, ""]:
        total = plan.expected_batch_size * optax.tree.vdot(private_grad, clipped)
        return total / built.sensitivity**2

    def one_trial(seed: int, present: bool) -> float:
        state, key = copy(start), processes.put(seeded_key(seed), start.noise.key.sharding)
        state = state._replace(noise=with_new_key(state.noise, key))
        step_scores = []
        for step in range(1, plan.num_steps + 1):
            clipped = built.means(state, with_canary, jnp.array([CANARY]))[0].clipped
            drawn = plan.mechanism.draw(seed, step)
            if not present:
                drawn = drawn[drawn >= CANARY + rows]  # every other example is drawn as before
            batch = sampling.pad(drawn, plan.capacity, seed, step).within(num_examples)
            state = built.step(state, with_canary if present else without, batch)
            step_scores.append(score(state.private_grad, clipped))
        # Of noise that is correlated, what is fresh: the attacker knows how it is made.
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
    """Lower bounds on ε at δ from scores, sound at the stated confidence.

    The threshold is chosen on the first fifth of the scores. On the rest, the Clopper-Pearson
    bounds of both error rates hold together with the stated confidence.

    `present` are scores of runs with the canary (higher means more of it), `absent` as many of runs
    without, at least 50; q and T are those of the mechanism.
    """
    if min(len(present), len(absent)) < 50:
        raise InputError("an audit needs at least 50 scores with and 50 without the canary")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}")
    num_held_out = len(present) // 5, len(absent) // 5
    threshold = _best_threshold(present[: num_held_out[0]], absent[: num_held_out[1]])
    missed = present[num_held_out[0] :] <= threshold
    alarmed = absent[num_held_out[1] :] > threshold
    level = 1 - (1 - confidence) / 2  # of each of the two
    false_negative, false_positive = (_upper(errors, level) for errors in (missed, alarmed))
    any_mechanism = max(
        _log_ratio(1 - delta - false_negative, false_positive),
        _log_ratio(1 - delta - false_positive, false_negative),
    )

    def allowed(f: tradeoff.Tradeoff) -> bool:
        """Whether a mechanism could have error rates this low."""
        return float(f(np.array([false_positive]))[0]) <= false_negative

    spent = epsilon_ruled_out(allowed, sampling_prob, num_steps, delta)
    return Audit(spent, max(0.0, any_mechanism), false_positive, false_negative)


def epsilon_ruled_out(
    allowed: Callable[[tradeoff.Tradeoff], bool], sampling_prob: float, num_steps: int, delta: float
) -> float:
    """The largest ε of a Poisson-sampled Gaussian whose noise, as all larger noise, is ruled out.

    `allowed` tells whether a trade-off function could give what was seen. 0 if nothing is.
    """

    def possible(sigma: float) -> bool:
        return allowed(_tradeoff(sigma, sampling_prob, num_steps))

    sigma = MOST_NOISE
    if possible(sigma):
        return 0.0
    while sigma > LEAST_NOISE and not possible(sigma / 2):
        sigma /= 2
    low = sigma / 2  # σ is ruled out, low is not (or was not asked)
    for _ in range(12 if sigma > LEAST_NOISE else 0):
        middle = math.sqrt(low * sigma)
        low, sigma = (middle, sigma) if possible(middle) else (low, middle)
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
    """ε of T steps of the Poisson-sampled Gaussian; exact without sampling."""
    if sampling_prob == 1:
        return tradeoff.epsilon_of_mu(math.sqrt(num_steps) / sigma, delta)
    return accounting.epsilon(
        noise_multiplier=sigma, sampling_prob=sampling_prob, num_steps=num_steps, delta=delta
    )


def _best_threshold(present: np.ndarray, absent: np.ndarray) -> float:
    """The threshold at which the bounds of the two error rates, taken together, say most."""

    def separation(threshold: float) -> float:
        missed, alarmed = _upper(present <= threshold, 0.95), _upper(absent > threshold, 0.95)
        return float(-stats.norm.ppf(missed) - stats.norm.ppf(alarmed))

    candidates = np.quantile(np.concatenate([present, absent]), np.linspace(0.02, 0.98, 97))
    return max((float(c) for c in candidates), key=separation)


def _upper(errors: np.ndarray, level: float) -> float:
    """Clopper-Pearson upper bound of an error rate."""
    count = int(np.sum(errors))
    if count == len(errors):
        return 1.0
    return float(stats.beta.ppf(level, count + 1, len(errors) - count))


def _log_ratio(numerator: float, denominator: float) -> float:
    return math.log(numerator / denominator) if numerator > 0 else 0.0
