r"""ε of choosing the best of a random number of trials (Papernot & Steinke 2022, arXiv 2110.03620).

A trial is a fresh run of one mechanism Q: draw a setting from a public grid, train with noise,
score the model with noise. Before the first trial, their number K is drawn from a truncated
negative binomial distribution. Only the trial with the best score is released. If Q has a Rényi
divergence of at most $\varepsilon(\lambda)$, then the search has at most, for every order
$\hat\lambda$ (Theorem 2),

$$\varepsilon'(\lambda) = \varepsilon(\lambda)
  + (1+\eta)\Big(1 - \frac{1}{\hat\lambda}\Big) \varepsilon(\hat\lambda)
  + \frac{(1+\eta) \log(1/\gamma)}{\hat\lambda} + \frac{\log \mathbb{E}[K]}{\lambda - 1}.$$

dp-accounting computes it (`RepeatAndSelectDpEvent`). The theorem protects only against readers who
do *not* know K: the number of trials, and everything about the other trials, must stay secret.
"""

import dataclasses
import functools
import math
from fractions import Fraction

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import optimize

from bam.core import scalars
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import accounting, mechanisms
from bam.privacy.mechanisms import Mechanism, OwnEvent

# The file that a search writes into the folder of the chosen trial alone.
CHOSEN = "chosen.json"
# Below, there is hardly a choice; above, the trials would take too long.
LEAST_TRIALS_MEAN, MOST_TRIALS_MEAN, MOST_TRIALS_SHAPE = 1.01, 10_000, 100
ONE = 2**128  # probability 1, as an integer
# Range of `score_noise_multiplier`. The noise on a score is an integer.
LEAST_SCORE_NOISE, MOST_SCORE_NOISE = 0.01, 2**20


@dataclasses.dataclass(frozen=True)
class Selection:
    r"""The number of trials and the noise on their scores. All fields are public.

    $P[K = k] \propto \frac{\Gamma(k + \eta)}{k!} (1 - \gamma)^k$ for k = 1, 2, …, with the γ that
    gives the mean.

    Attributes:
      trials_mean: E[K], from 1.01.
      trials_shape: η ≥ 0; 0 is the logarithmic distribution, 1 the geometric one.
      score_noise_multiplier: standard deviation of a score's noise divided by its sensitivity.

    Raises:
      InputError: if a field is out of range. So is η = ∞, the Poisson distribution, because it may
        draw no trial.
    """

    trials_mean: float
    trials_shape: float
    score_noise_multiplier: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            read = scalars.number(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, read)
        if not LEAST_TRIALS_MEAN <= self.trials_mean <= MOST_TRIALS_MEAN:
            raise InputError(
                f"trials_mean must be from {LEAST_TRIALS_MEAN} to {MOST_TRIALS_MEAN}, got "
                f"{self.trials_mean}"
            )
        if not 0 <= self.trials_shape <= MOST_TRIALS_SHAPE:
            raise InputError(
                f"trials_shape must be from 0 (logarithmic; 1: geometric) to {MOST_TRIALS_SHAPE}, "
                f"got {self.trials_shape}"
            )
        if not LEAST_SCORE_NOISE <= self.score_noise_multiplier <= MOST_SCORE_NOISE:
            raise InputError(
                f"score_noise_multiplier must be from {LEAST_SCORE_NOISE} to {MOST_SCORE_NOISE}, "
                f"got {self.score_noise_multiplier}"
            )

    @functools.cached_property
    def gamma(self) -> float:
        """γ in (0, 1), for which the distribution has the mean `trials_mean`."""

        def excess(log_gamma: float) -> float:
            return math.log(_mean(math.exp(log_gamma), self.trials_shape) / self.trials_mean)

        # The mean grows as 1/γ, so this γ is below the solution.
        lowest = -math.log(1e3 * (1 + self.trials_shape) * self.trials_mean)
        return math.exp(float(optimize.brentq(excess, lowest, -1e-6, xtol=1e-15)))

    def num_trials(self, uniform: float | Fraction) -> int:
        """Returns K, by inverting its distribution function at a uniform number from [0, 1).

        Probabilities are doubles. If the number has 128 bits, the drawn law differs from K's by
        less than 1e-12 in total variation.
        """
        gamma, shape = self.gamma, self.trials_shape
        total = math.log(1 / gamma) if shape == 0 else math.expm1(-shape * math.log(gamma)) / shape
        k, probability = 1, (1 - gamma) / total
        left = int(uniform * ONE)
        # Below 1e-30 only the rounding of the probabilities is left, and the search ends. But not
        # before the mean: for a large shape the first probabilities are tiny, too.
        while left >= (share := int(probability * ONE)) and (
            k < self.trials_mean or probability > 1e-30
        ):
            left -= share  # integers, so that no rounding adds up
            probability *= (1 - gamma) * (k + shape) / (k + 1)
            k += 1
        return k


def best_of_trials(
    num_examples: int,
    batch_size: int,
    trials_mean: float,
    trials_shape: float,
    score_noise_multiplier: float,
) -> Mechanism:
    """Poisson batches for a trial of a search, which releases only the best trial.

    ε is that of the whole search. A private search makes its trials' configs with this mechanism.
    For a single run, it claims a larger ε than was spent.
    """
    trials = Selection(trials_mean, trials_shape, score_noise_multiplier)
    one = mechanisms.poisson(num_examples, batch_size)
    return dataclasses.replace(
        one,
        batches=f"{one.batches}, for the best of a random number of such runs, "
        f"{trials.trials_mean:g} on average",
        # The overflow probability is shared by the draws of all trials.
        capacity=lambda probability: one.capacity(probability / trials.trials_mean),
        event=lambda sigma, num_steps: TrialsDpEvent(trials, sigma, one.sampling_prob, num_steps),
        check=_check_trial,
    )


def _check_trial(unit: str, accountant: str, private: bool) -> None:
    if accountant != "rdp" or not private:
        raise InputError("a private choice needs private runs with accountant rdp")
    if unit == "user":
        raise InputError(
            "a private choice does not protect users, because scores count examples: use "
            "group_size 0"
        )


@dataclasses.dataclass(frozen=True)
class TrialsDpEvent(OwnEvent):
    """A search over trials, each with T steps on Poisson batches and one noised score."""

    selection: Selection
    noise_multiplier: float
    sampling_prob: float
    num_steps: int

    def epsilon(self, delta: float, accountant: str) -> float:
        """Returns ε of the search, which only RDP bounds here."""
        if accountant != "rdp":
            raise InputError("a private choice needs private runs with accountant rdp")
        return epsilon(delta=delta, **vars(self))

    def least_noise(self, target_epsilon: float, delta: float, accountant: str) -> float:
        """Returns the smallest σ of a trial's training, see `noise_multiplier`."""
        return noise_multiplier(
            self.selection,
            target_epsilon=target_epsilon,
            delta=delta,
            sampling_prob=self.sampling_prob,
            num_steps=self.num_steps,
        )

    def as_dp_accounting(self) -> RepeatAndSelectDpEvent:
        """Returns the event in dp-accounting."""
        trial = _trial(
            self.selection.score_noise_multiplier,
            self.noise_multiplier,
            self.sampling_prob,
            self.num_steps,
        )
        chosen = self.selection
        return RepeatAndSelectDpEvent(trial, chosen.trials_mean, chosen.trials_shape)


def epsilon(
    selection: Selection,
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    orders: tuple[float, ...] | None = None,
) -> float:
    """Returns ε of releasing only the best trial, with its setting and score, by RDP.

    A trial has T steps of the Poisson-sampled Gaussian mechanism and one noised score. All trials
    have the same σ, q and T. `orders` are Rényi orders; None takes dp-accounting's. The other
    arguments and errors are those of `accounting.epsilon`. RDP is the only accountant here that
    bounds a search.

    Examples:
      >>> run = dict(noise_multiplier=3.5, sampling_prob=0.1782, num_steps=100, delta=1e-5)
      >>> round(epsilon(Selection(8, 1, 10), **run), 2)
      4.58
    """
    steps = accounting.read_steps(sampling_prob, num_steps, delta)
    accounting.check_steps(*steps, "rdp")
    sigma = scalars.real("noise_multiplier", noise_multiplier)
    accounting.check_noise_multiplier(sigma)
    return _epsilon(selection, sigma, *steps, orders)


@functools.lru_cache(maxsize=4096)
def _epsilon(
    selection: Selection,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    orders: tuple[float, ...] | None,
) -> float:
    if noise_multiplier == 0 and sampling_prob > 0 and num_steps > 0:
        return math.inf
    best = TrialsDpEvent(selection, noise_multiplier, sampling_prob, num_steps).as_dp_accounting()
    with accounting.without_order_warnings():
        return float(RdpAccountant(orders).compose(best).get_epsilon(delta))


def noise_multiplier(
    selection: Selection,
    *,
    target_epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
) -> float:
    """Returns the smallest σ of the trials' training that keeps the whole search within (ε, δ).

    ε is never above the target and at most a relative 1e-5 below it. InputError as in
    `accounting.noise_multiplier`, and if choosing and scoring trials leaves less than a tenth of
    the target for training.
    """
    target_epsilon = scalars.real("target_epsilon", target_epsilon)
    sampling_prob, num_steps, delta = accounting.read_steps(sampling_prob, num_steps, delta)
    steps: JsonObject = {"sampling_prob": sampling_prob, "num_steps": num_steps, "delta": delta}
    accounting.check_search(target_epsilon, sampling_prob, num_steps)
    # σ = ∞ leaves the cost of drawing and scoring trials.
    without_training = epsilon(selection, noise_multiplier=math.inf, **steps)
    if without_training > 0.9 * target_epsilon:
        raise InputError(
            f"the choice alone costs epsilon {without_training:.3g} of {target_epsilon:g}: take "
            "fewer trials on average, more noise on the score, or a larger epsilon"
        )

    def spent(sigma: float, orders: tuple[float, ...] | None = None) -> float:
        return epsilon(selection, noise_multiplier=sigma, orders=orders, **steps)

    # A few orders bracket σ; all of them refine it. For a small target no noise is enough by a few.
    near, few = 1.0, accounting.FEW_ORDERS
    if spent(math.inf, few) <= 0.9 * target_epsilon:
        near = accounting.least_noise(lambda sigma: spent(sigma, few), target_epsilon, near, 1e-2)
    return accounting.least_noise(spent, target_epsilon, near, 1e-5)


@functools.lru_cache(maxsize=64)
def composed_epsilon(
    num_trials: int,
    score_noise_multiplier: float,
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    accountant: str,
) -> float:
    """Returns ε of a full grid search by composition: `num_trials` trials, *all* of them released.

    With one trial, it is the ε of that trial alone. `accountant` is "pld" or "rdp".
    """
    trial = _trial(score_noise_multiplier, noise_multiplier, sampling_prob, num_steps)
    accountants = {"pld": PLDAccountant, "rdp": RdpAccountant}
    if accountant not in accountants:
        raise InputError(f"unknown accountant {accountant!r}; choose from pld, rdp")
    with accounting.without_order_warnings():
        composed = accountants[accountant]().compose(trial, num_trials)
        return float(composed.get_epsilon(delta))


def _trial(
    score_noise_multiplier: float, noise_multiplier: float, sampling_prob: float, num_steps: int
) -> dp_accounting.DpEvent:
    """Returns the event of a training and one noised score of its result."""
    score = dp_accounting.GaussianDpEvent(score_noise_multiplier)
    if num_steps == 0 or sampling_prob == 0 or math.isinf(noise_multiplier):
        return score
    training = accounting.poisson_event(noise_multiplier, sampling_prob, num_steps)
    return dp_accounting.ComposedDpEvent([training, score])


def _mean(gamma: float, shape: float) -> float:
    """E[K] of Definition 1: (1/γ - 1) / log(1/γ) if η = 0, else η (1/γ - 1) / (1 - γ^η)."""
    log = math.log(gamma)
    return math.expm1(-log) / (-log if shape == 0 else -math.expm1(shape * log) / shape)
