"""A lower bound on ε from one training run on a user's data, with added canaries.

The training split gets m *canaries*, and a fair coin decides for each whether it takes part. A
canary's gradient has a single non-zero entry, another one for each canary, and is long enough to be
clipped. That is the worst case of the proof, which a picture does not reach. All else is the user's
run: data, model, method, clip, sampling, noise, optimizer.

The attacker knows everything but the coins and the canaries' batches. They read each canary's entry
in every privatised gradient, and guess "in" for the highest scores and "out" for the lowest. The
number of correct guesses gives lower bounds on ε: `epsilon_any_mechanism` (Steinke et al. 2023) and
`tradeoff_is_possible` (Mahloujifar et al. 2024). Both hold even if the noise of one entry depends
on that of another. If noise is independent, as planned, all coins can be guessed one after another,
and `coins_are_possible` gives a better bound.

NOT PRIVATE: the attacker knows the training data, and the model has learned from canaries. Release
neither the scores nor the weights of such a run.

Sources: Steinke, Nasr, Jagielski 2023, "Privacy Auditing with One (1) Training Run"; Mahloujifar,
Melis, Chaudhuri 2024, "Auditing f-Differential Privacy in One Run".
"""

import bisect
import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree
from scipy import optimize, special, stats

from bam import waits
from bam.audit import canary
from bam.audit.audited import with_step
from bam.audit.whole_run import clipped_gradient_sum, flat
from bam.core import chacha, pytree, sampling, seeds
from bam.core.oracles import Method, Oracle
from bam.core.pytree import Grads, Params
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.privacy import tradeoff
from bam.privacy.plan import PrivacyPlan
from bam.privacy.private_gradient import DrawnBatch
from bam.training import loading, loop, methods
from bam.training.step import TrainState
from bam.training.trainer import Trainer

with needs("train"):
    from ml_collections import ConfigDict

# The norm of a canary's gradient before clipping, above any clip norm in use.
CANARY_NORM = 1e6
# The share of canaries that are guessed if their scores may be dependent. Fewer guesses are surer,
# more are better statistics: for 500 to 5000 canaries and a Gaussian mechanism with ε from 1 to 8,
# a tenth is nearly the best for both bounds.
GUESSED_SHARE = 0.1


class OneRun(NamedTuple):
    """The result of one run: each canary's score, higher for "in", and its coin."""

    scores: Float[np.ndarray, " canaries"]
    included: Bool[np.ndarray, " canaries"]
    test_accuracy: float  # shows that the training was real


class Bounds(NamedTuple):
    """Three lower bounds on ε, each with the stated confidence alone, and the guesses behind them.

    `epsilon_lower_any` holds for any mechanism, and `epsilon_lower` for mechanisms with the
    trade-off function of the Poisson-sampled Gaussian for some σ. `epsilon_lower_independent` also
    assumes that the scores of different canaries are independent, see `coins_are_possible`. Without
    Poisson batches, all three are equal.
    """

    epsilon_lower: float
    epsilon_lower_any: float
    epsilon_lower_independent: float
    num_guesses: int
    num_correct: int
    num_correct_of_all: int


def build(config: ConfigDict, num_canaries: int) -> Trainer:
    """The trainer of a user's config, with m canaries after the rows of the training split.

    N counts all canaries, and the noise is planned for q = l/N at the config's ε. Diagnostics are
    off.

    Raises:
      InputError: if the config is not private, protects users, sets N, streams its data or
        correlates the noise over steps, or if m is not from 1 to the number of parameters.
    """
    if not methods.is_private(config.method.name):
        raise InputError(f"method {config.method.name} has no ε to audit: choose a private one")
    if config.num_examples is not None:
        raise InputError("bam audit --one_run counts N: leave out --config.num_examples")
    if config.dataset.group_size:
        raise InputError(
            "bam audit --one_run audits examples, not users: set --config.dataset.group_size=0"
        )
    config = config.copy_and_resolve_references()
    config.diagnostics.every = 0
    dataset = loading.make_dataset(config.dataset, config.features)
    if datasets.streams(dataset):
        raise InputError(
            "bam audit --one_run needs data in memory: set --config.dataset.memory=device"
        )
    images, labels = dataset.train
    num_real = len(labels)
    images = np.concatenate([images, np.zeros((num_canaries, *images.shape[1:]), images.dtype)])
    labels = np.concatenate([labels, np.zeros(num_canaries, labels.dtype)])
    built = loop.build(config, dataset._replace(train=datasets.Split(images, labels)))
    if len(built.plan.mechanism.strategy) > 1:
        raise InputError(
            "bam audit --one_run needs independent noise, not mechanism banded: "
            "set --config.mechanism.name=poisson"
        )
    if not 1 <= num_canaries <= built.num_params:
        raise InputError(
            f"--canaries={num_canaries} must be from 1 to the number of parameters, "
            f"{built.num_params}"
        )
    gradient = built.parts.gradient
    oracle = with_canaries(gradient.oracle, num_real, num_canaries)
    gradient = dataclasses.replace(gradient, oracle=oracle)
    return dataclasses.replace(built, parts=dataclasses.replace(built.parts, gradient=gradient))


def with_canaries(oracle: Method, num_real: int, num_canaries: int) -> Oracle:
    """The oracle, with single entries as the gradients of canaries, the rows from `num_real` on."""

    def grad(params: Params, example: dict[str, PyTree]) -> Grads:
        grads, number = oracle.grad(params, example), example["row"] - num_real
        is_canary = (number >= 0) & (number < num_canaries)  # not for a padded row
        entries = jnp.asarray(entries_of(pytree.num_params(params), num_canaries))
        entry = entries[jnp.clip(number, 0, num_canaries - 1)]
        leaves, structure = jax.tree.flatten(grads)
        start, results = 0, []
        for leaf in leaves:
            one_hot = (jnp.arange(leaf.size) == entry - start).reshape(leaf.shape)
            results.append(jnp.where(is_canary, CANARY_NORM * one_hot, leaf).astype(leaf.dtype))
            start += leaf.size
        return jax.tree.unflatten(structure, results)

    return Oracle(oracle.ascend, grad)


def entries_of(num_params: int, num_canaries: int) -> Int[np.ndarray, " canaries"]:
    """The index of each canary's entry in the parameters, which are laid end to end."""
    return np.random.default_rng(0).permutation(num_params)[:num_canaries].astype(np.int32)


def run(
    built: Trainer,
    num_canaries: int,
    seed: int | None,
    on_row: Callable[[JsonObject], None] = lambda row: None,
    log: Callable[[str], None] = lambda line: None,
) -> OneRun:
    r"""Trains once, with the canaries that their coins include, and scores all canaries.

    It writes no file. The score is the logarithm of the likelihood ratio of "in" and "out": the sum
    over the steps of $\log(1 - q + q e^{(x - 1/2)/s^2})$, or with random allocation the sum over
    the epochs of the logarithm of the mean of $e^{(x - 1/2)/s^2}$. Here x is the canary's entry of
    the privatised sum, less the sum of the other examples in the batch, divided by S; and s is the
    planned noise multiplier. So a score depends on the coin, batches and noise of its canary alone.

    Args:
      built: a trainer from `build`.
      num_canaries: the number of canaries given to `build`.
      seed: seed of the run and of the coins; None for the operating system's randomness.
      on_row: as for `loop.train`.
      log: as for `loop.train`.
    """
    plan, sensitivity = built.plan, built.sensitivity
    num_rows = len(built.dataset.train.labels)
    num_real = num_rows - num_canaries
    entries = entries_of(built.num_params, num_canaries)
    coins_key = seeds.host_key(secrets.randbits(256) if seed is None else seed, "coins")
    coins = chacha.words(coins_key, num_canaries, chacha.nonce(chacha.Stream.COINS, 0))
    included = coins < 2**31
    takes_part = np.ones(num_rows, bool)
    takes_part[num_real:] = included
    log_ratios: list[np.ndarray] = []

    rows = built.place_rows()

    def scored_step(state: TrainState, batch: DrawnBatch) -> TrainState:
        indices, mask = np.asarray(batch.examples["row"]), np.asarray(batch.mask)
        # Excluded canaries are masked, so places and draws of the other examples stay the same.
        included_mask = mask & takes_part[np.where(mask, indices, 0)]
        others = sampling.PaddedBatch(indices, mask).within(num_real)
        is_first = not log_ratios
        with waits.compiling(log, "the step") if is_first else contextlib.nullcontext():
            known = clipped_gradient_sum(built, state, built.batch(state, others, rows))[entries]
            included_rows = sampling.PaddedBatch(indices, included_mask)
            state = built.step(state, built.batch(state, included_rows, rows))
        total = plan.expected_batch_size * flat(state.private.previous)[entries]
        log_ratios.append(((total - known) / sensitivity - 0.5) / plan.noise_multiplier**2)
        return state

    result = loop.train(with_step(built, scored_step), seed, on_row=on_row, log=log)
    scores = scores_of(np.array(log_ratios), plan)
    return OneRun(scores, included, result.summary["test_accuracy"] or 0.0)


def scores_of(
    log_ratios: Float[np.ndarray, "steps canaries"], plan: PrivacyPlan
) -> Float[np.ndarray, " canaries"]:
    """The log-likelihood ratios of a run, from those of its steps for a canary in the batch.

    The ratio without evidence, which is the same for all canaries, is left out: beside it, small
    differences would be rounded away, and scores would tie. For the same reason an epoch's score is
    `logaddexp(0, evidence - offset)` and not `logaddexp(offset, evidence) - offset`.
    """
    prob, period = plan.mechanism.sampling_prob, plan.mechanism.period
    epochs = [log_ratios[i : i + period] for i in range(0, len(log_ratios), period)]
    evidence = np.array([special.logsumexp(epoch, axis=0) for epoch in epochs])
    # The probability that a canary is in no batch of an epoch; in a complete one 0, up to rounding.
    in_none = np.array([1 - len(epoch) * prob for epoch in epochs])
    in_none[in_none < 1e-9] = 0.0
    with np.errstate(divide="ignore"):
        offset = np.log(in_none / prob)[:, None]
    scores = np.where(offset > -np.inf, np.logaddexp(0, evidence - offset), evidence)
    return np.sum(scores, axis=0)


def bounds(seen: OneRun, plan: PrivacyPlan, confidence: float = 0.95) -> Bounds:
    """Lower bounds on ε from one run, with the numbers of guesses that are fixed before it.

    A score that is NaN is no evidence: it is guessed last, and then counts as a wrong guess.
    """
    if not 0 < confidence < 1:
        raise InputError(f"--confidence={confidence} must be between 0 and 1, such as 0.95")
    num_canaries, level = len(seen.scores), 1 - confidence
    num_guesses = guesses(num_canaries)
    is_nan, half = np.isnan(seen.scores), num_guesses // 2
    known = seen.scores[~is_nan]
    order = np.argsort(np.where(is_nan, np.median(known) if known.size else 0.0, seen.scores))
    is_in, is_out = seen.included & ~is_nan, ~seen.included & ~is_nan
    num_correct = int(np.sum(is_in[order[-half:]]) + np.sum(is_out[order[:half]]))
    any_mechanism = epsilon_any_mechanism(num_canaries, num_guesses, num_correct, plan.delta, level)
    epsilon_lower = independent = any_mechanism
    of_all = correct_in_turn(seen)
    if steps := plan.dp_event:
        epsilon_lower, independent = (
            canary.epsilon_ruled_out(is_allowed, steps.sampling_prob, steps.num_steps, plan.delta)
            for is_allowed in (
                lambda f: tradeoff_is_possible(f, num_canaries, num_guesses, num_correct, level),
                lambda f: coins_are_possible(f, num_canaries, of_all, level),
            )
        )
    return Bounds(epsilon_lower, any_mechanism, independent, num_guesses, num_correct, of_all)


def guesses(num_canaries: int) -> int:
    """The number of guesses, half "in" and half "out": public, and fixed before the run."""
    return max(2, 2 * round(GUESSED_SHARE * num_canaries / 2))


def epsilon_any_mechanism(
    num_canaries: int, num_guesses: int, num_correct: int, delta: float, level: float = 0.05
) -> float:
    r"""The largest ε that is refuted: no (ε, δ)-DP mechanism allows so many correct guesses.

    At least v of r guesses are right with probability at most

    $\beta + 2 m \delta \max_i (P[B \ge v - i] - \beta)/i,\quad \beta = P[B \ge v]$

    where B is binomial with r draws and probability 1/(1 + e^-ε), and m is the number of canaries.
    `level` is one minus the confidence.

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
    """Whether an f-DP mechanism with symmetric f may allow so many correct guesses, at this level.

    Source: Algorithm 3 of Mahloujifar et al. 2024 ("with cap"), for coins.
    """
    right = level * num_correct / num_canaries
    wrong = level * (num_guesses - num_correct) / num_canaries
    for i in range(num_correct - 1, -1, -1):
        least = max(wrong, float(f(np.array([1 - right]))[0]))
        if least == wrong:
            break  # from here on, neither changes
        right = min(1.0, right + i / (num_guesses - i) * (least - wrong))
        wrong = least
    return right + wrong <= num_guesses / num_canaries


def correct_in_turn(seen: OneRun) -> int:
    """The number of correct guesses if all coins are guessed, one after another.

    The guess is "in" if the score is above the median of the scores before it. A score that is NaN
    counts as a wrong guess.
    """
    num_correct, before = 0, list[float]()  # sorted
    for score, included in zip(seen.scores, seen.included, strict=True):
        if not np.isnan(score):
            threshold = before[len(before) // 2] if before else 0.0
            num_correct += int((score > threshold) == included)
            bisect.insort(before, score)
    return num_correct


def coins_are_possible(
    f: tradeoff.Tradeoff, num_canaries: int, num_correct: int, level: float = 0.05
) -> bool:
    r"""Whether so many coins may be guessed right, at this level, if f holds canary by canary.

    The hypothesis: given the coins and scores of the canaries before it, a canary's coin is still
    fair, and its scores with coin 0 and with coin 1 have a trade-off function of at least f, which
    is symmetric. A correct implementation fulfils it: noise is independent from entry to entry,
    batches are from example to example, and a score depends on its own canary's coin, batches and
    noise alone.

    Then at least v of m coins are guessed right with probability at most $P[B \ge v]$, where B is
    binomial with m draws and probability $1 - a$, and a is the fixed point of f.

    Proof: given the past, a guess is a test of coin 0 against coin 1 with errors α and β ≥ f(α). So
    it is right with probability $1 - (\alpha + \beta)/2$. That is at most $1 - a$, because f is
    convex and symmetric, and α + f(α) is least where both are equal. This is so after every past,
    so the correct guesses are at most, in distribution, the successes of m independent draws.

    The hypothesis is needed: a mechanism whose scores are dependent may have the trade-off function
    f for each canary, and still reveal all coins better in a few of its runs.
    """
    fixed = optimize.brentq(lambda a: float(f(np.array([a]))[0]) - a, 0.0, 1.0, xtol=1e-12)
    return bool(stats.binom.sf(num_correct - 1, num_canaries, 1 - fixed) > level)
