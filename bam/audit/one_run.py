"""A lower bound on ε from one training run, with canaries beside one's own data.

m *canaries* are added to the training split, and a fair coin decides of each whether it takes part.
A canary is an example whose gradient is one entry of the parameters alone, a different one for each
canary, and long enough to be clipped: the worst case of the proof, which no picture reaches. All
else is the user's run: data, model, method, clip, sampling, noise, optimizer. An attacker who knows
everything but the coins and the batches reads each canary's entry in every privatised gradient, and
guesses "in" for the highest scores, "out" for the lowest. How often that is right bounds ε from
below: `epsilon_any_mechanism` (Steinke et al. 2023), `tradeoff_is_possible` (Mahloujifar et al.
2024).

NOT PRIVATE: the attacker knows the training data, and the model has learned from canaries. Release
neither the scores nor the weights of such a run.

Sources: Steinke, Nasr, Jagielski 2023, "Privacy Auditing with One (1) Training Run"; Mahloujifar,
Melis, Chaudhuri 2024, "Auditing f-Differential Privacy in One Run".
"""

import dataclasses
import secrets
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree
from scipy import optimize, special, stats

from bam.audit import canary
from bam.audit.whole_run import flat
from bam.core import chacha, pytree, sampling, seeds
from bam.core.oracles import Oracle
from bam.core.pytree import Grads, Params
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.privacy import tradeoff
from bam.privacy.plan import PrivacyPlan
from bam.training import loading, loop, methods
from bam.training.step import TrainState
from bam.training.trainer import Trainer
from bam.training.trainer import build as build_trainer

with needs("train"):
    from ml_collections import ConfigDict

# Of a canary's gradient before it is clipped: any clip norm in use is shorter.
CANARY_NORM = 1e6
# The part of the batch size that the attacker's estimate of everybody else's gradients reads.
SAMPLE_SHARE = 4
# Of the canaries. Fewer guesses are surer, more of them are better statistics: for 500 to 5000
# canaries and a Gaussian mechanism with ε from 1 to 8 a tenth is near the best for both bounds.
GUESSED_SHARE = 0.1


class OneRun(NamedTuple):
    """What one run gave away: each canary's score (higher means rather "in"), and its coin."""

    scores: Float[np.ndarray, " canaries"]
    included: Bool[np.ndarray, " canaries"]
    test_accuracy: float  # shows that it was a real training


class Bounds(NamedTuple):
    """Lower bounds on ε, each at the stated confidence by itself, and the guesses behind both.

    `epsilon_lower` is of a mechanism whose trade-off function is that of the Poisson-sampled
    Gaussian for some σ, `epsilon_lower_any` of any mechanism. Of other batches than Poisson's both
    are the latter.
    """

    epsilon_lower: float
    epsilon_lower_any: float
    num_guesses: int
    num_correct: int


def build(config: ConfigDict, num_canaries: int) -> Trainer:
    """A user's experiment with m canaries after the rows of its training split.

    N counts all canaries, q = l/N, and the noise is planned for that, at the config's ε. The last m
    rows are the canaries. Diagnostics are switched off: nothing is read on the side. InputError if
    the config is not private, or of users, its noise is correlated over steps, or m is not from 1
    to the number of parameters.
    """
    if not methods.is_private(config.method.name):
        raise InputError("a non-private run claims no ε to audit")
    if config.num_examples is not None:
        raise InputError("one run is audited of an N that is counted: num_examples must not be set")
    if config.dataset.group_size:
        raise InputError(
            "one run is audited of examples, not of users: dataset.group_size must be 0"
        )
    config = config.copy_and_resolve_references()
    config.diagnostics.every = 0
    dataset = loading.make_dataset(config.dataset, config.features)
    if datasets.streams(dataset):
        raise InputError("one run is audited on data in memory: set dataset.memory=device")
    images, labels = dataset.train
    num_real = len(labels)
    images = np.concatenate([images, np.zeros((num_canaries, *images.shape[1:]), images.dtype)])
    labels = np.concatenate([labels, np.zeros(num_canaries, labels.dtype)])
    built = build_trainer(config, dataset._replace(train=datasets.Split(images, labels)))
    if len(built.plan.mechanism.strategy) > 1:
        raise InputError("one run is audited of independent noise, not of mechanism banded's")
    if not 1 <= num_canaries <= built.num_params:
        raise InputError(
            f"canaries must be from 1 to the number of parameters, {built.num_params}, "
            f"got {num_canaries}"
        )
    return dataclasses.replace(built, oracle=with_canaries(built.oracle, num_real, num_canaries))


def with_canaries(own: Oracle, num_real: int, num_canaries: int) -> Oracle:
    """An oracle but for canaries, the examples after the first `num_real`: single entries."""

    def grad(params: Params, example: dict[str, PyTree]) -> Grads:
        grads, number = own.grad(params, example), example["row"] - num_real
        is_canary = (number >= 0) & (number < num_canaries)  # a padded row is none
        entries = jnp.asarray(entries_of(pytree.num_params(params), num_canaries))
        entry = entries[jnp.clip(number, 0, num_canaries - 1)]
        leaves, structure = jax.tree.flatten(grads)
        start, kept = 0, []
        for leaf in leaves:
            here = (jnp.arange(leaf.size) == entry - start).reshape(leaf.shape)
            kept.append(jnp.where(is_canary, CANARY_NORM * here, leaf).astype(leaf.dtype))
            start += leaf.size
        return jax.tree.unflatten(structure, kept)

    return Oracle(own.ascend, grad)


def entries_of(num_params: int, num_canaries: int) -> Int[np.ndarray, " canaries"]:
    """The entry of the parameters, laid end to end, that each canary's gradient is made of."""
    return np.random.default_rng(0).permutation(num_params)[:num_canaries].astype(np.int32)


def run(
    built: Trainer,
    num_canaries: int,
    seed: int | None,
    on_row: Callable[[JsonObject], None] = lambda row: None,
    log: Callable[[str], None] = lambda line: None,
) -> OneRun:
    r"""Trains once, with each canary that its coin includes, and scores all; nothing is written.

    `built` is of so many canaries, see `build`.

    The score is the logarithm of the likelihood ratio of "in" and "out": the sum over the steps of
    $\log(1 - q + q e^{(x - 1/2)/s^2})$, or with random allocation over the epochs of the logarithm
    of the mean of $e^{(x - 1/2)/s^2}$. x is the canary's entry of the privatised sum over S, less
    what the attacker expects of all other examples, and s the spread of all x of the step. `seed`,
    `on_row` and `log` are those of `loop.train`; the seed is that of the coins, too.
    """
    plan, sensitivity = built.plan, built.sensitivity
    num_rows = len(built.dataset.train.labels)
    num_real = num_rows - num_canaries
    entries = entries_of(built.num_params, num_canaries)
    coins_key = seeds.host_key(secrets.randbits(256) if seed is None else seed, "coins")
    coins = chacha.words(coins_key, num_canaries, chacha.nonce(chacha.Stream.COINS, 0))
    included = coins < 2**31
    rng = np.random.default_rng(0)  # the attacker's own
    takes_part = np.ones(num_rows, bool)
    takes_part[num_real:] = included
    sample_size = min(num_real, max(1, plan.expected_batch_size // SAMPLE_SHARE))
    log_ratios: list[np.ndarray] = []

    def scored_step(
        state: TrainState, data: datasets.Split, batch: sampling.PaddedBatch
    ) -> TrainState:
        sample = rng.choice(num_real, sample_size, replace=False).astype(np.int32)
        mean = flat(built.means(state, data, sample)[0].clipped)[entries]
        indices, mask = (np.asarray(x) for x in batch)
        here = mask & takes_part[np.where(mask, indices, 0)]  # every other example is as before
        state = built.take_step(state, data, sampling.PaddedBatch(indices, here))
        total = plan.expected_batch_size * flat(state.private_grad)[entries]
        x = (total - plan.sampling_prob * num_real * mean) / sensitivity
        variance = (stats.median_abs_deviation(x) / special.ndtri(0.75)) ** 2
        log_ratios.append((x - 0.5) / variance)
        return state

    scored = dataclasses.replace(built, audited_step=scored_step)
    result = loop.train(scored, seed, on_row=on_row, log=log)
    scores = scores_of(np.array(log_ratios), plan)
    return OneRun(scores, included, result.summary["test_accuracy"] or 0.0)


def scores_of(
    log_ratios: Float[np.ndarray, "steps canaries"], plan: PrivacyPlan
) -> Float[np.ndarray, " canaries"]:
    """The log-likelihood ratio of a run, of those of its steps for whoever is in their batch.

    It leaves out what is equal for all canaries: the ratio without any evidence, beside which small
    differences would be rounded away, so that scores tie. Nothing is taken out of its logarithm,
    for the same reason.
    """
    prob, period = plan.mechanism.sampling_prob, plan.mechanism.period
    epochs = [log_ratios[i : i + period] for i in range(0, len(log_ratios), period)]
    drawn = np.array([special.logsumexp(epoch, axis=0) for epoch in epochs])
    in_none = np.array([1 - len(epoch) * prob for epoch in epochs])  # of the steps of an epoch
    in_none[in_none < 1e-9] = 0.0  # but for rounding
    with np.errstate(divide="ignore"):
        less = np.log(in_none / prob)[:, None]
    return np.sum(np.where(less > -np.inf, np.logaddexp(0, drawn - less), drawn), axis=0)


def bounds(seen: OneRun, plan: PrivacyPlan, confidence: float = 0.95) -> Bounds:
    """Lower bounds on ε from one run; `guesses` is fixed before, so no choice is corrected for."""
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}")
    num_canaries, level = len(seen.scores), 1 - confidence
    num_guesses = guesses(num_canaries)
    order, half = np.argsort(seen.scores), num_guesses // 2
    num_correct = int(np.sum(seen.included[order[-half:]]) + np.sum(~seen.included[order[:half]]))
    any_mechanism = epsilon_any_mechanism(num_canaries, num_guesses, num_correct, plan.delta, level)
    epsilon_lower = any_mechanism
    if steps := plan.dp_event:
        epsilon_lower = canary.epsilon_ruled_out(
            lambda f: tradeoff_is_possible(f, num_canaries, num_guesses, num_correct, level),
            steps.sampling_prob,
            steps.num_steps,
            plan.delta,
        )
    return Bounds(epsilon_lower, any_mechanism, num_guesses, num_correct)


def guesses(num_canaries: int) -> int:
    """How many guesses are made, half "in" and half "out": public, and known before the run."""
    return max(2, 2 * round(GUESSED_SHARE * num_canaries / 2))


def epsilon_any_mechanism(
    num_canaries: int, num_guesses: int, num_correct: int, delta: float, level: float = 0.05
) -> float:
    r"""The largest ε such that no (ε, δ)-DP mechanism allows so many correct guesses.

    Of r guesses, v are right with probability at most

    $\beta + 2 m \delta \max_i (P[B \ge v - i] - \beta)/i,\quad \beta = P[B \ge v]$

    where B is binomial of r draws with probability 1/(1 + e^-ε) and m the number of canaries. The
    level is one minus the confidence.

    Source: Theorem 5.2 and Appendix D of Steinke et al. 2023.
    """

    def excess(epsilon: float) -> float:
        right = stats.binom(num_guesses, special.expit(epsilon))
        beta = right.sf(num_correct - 1)
        i = np.arange(1, num_correct + 1)
        alpha = np.max((right.sf(num_correct - i - 1) - beta) / i, initial=0.0)
        return float(beta + 2 * num_canaries * delta * alpha - level)

    if excess(0.0) >= 0:
        return 0.0
    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    return float(optimize.brentq(excess, 0.0, upper, xtol=1e-9))


def tradeoff_is_possible(
    f: tradeoff.Tradeoff, num_canaries: int, num_guesses: int, num_correct: int, level: float = 0.05
) -> bool:
    """Whether an f-DP mechanism, f symmetric, could allow so many correct guesses, at this level.

    Source: Algorithm 3 of Mahloujifar et al. 2024 ("with cap"), for coins.
    """
    right = level * num_correct / num_canaries
    wrong = level * (num_guesses - num_correct) / num_canaries
    for i in range(num_correct - 1, -1, -1):
        least = max(wrong, float(f(np.array([1 - right]))[0]))
        if least == wrong:
            break  # neither changes any more
        right = min(1.0, right + i / (num_guesses - i) * (least - wrong))
        wrong = least
    return right + wrong <= num_guesses / num_canaries
