r"""ε of choosing the best of a random number of trials.

A trial is a fresh run of one mechanism Q: draw a setting from a public grid, train with noise,
score the model with noise. Before the first trial, their number K is drawn from a truncated
negative binomial distribution with shape η and parameter γ. Only the trial with the best score is
released. Both bounds protect only against readers who do *not* know K: the number of trials, and
everything about the other trials, must stay secret.

**By privacy profiles** (accountant pld). Let δ(ε) be the profile of one trial, for both orders of
the neighbours, and ε(δ) its inverse. The search is $(\varepsilon', \delta)$-DP with

$$\varepsilon' = \varepsilon(\delta / \mathbb{E}[K]) + (1 + \eta) \varepsilon_1, \qquad
  \delta(\varepsilon_1) = (e^{\varepsilon_1} - 1) \frac{\gamma}{1 - \gamma}.$$

Proof. Let f be the density of a trial's output and F the distribution function of its score, and f'
and F' those of the neighbour. Equal scores are ordered at random. The released trial has the
density $f \varphi'(F)$, where φ is the generating function of K:
$\varphi'(z) = \mathbb{E}[K] \big(\frac{\gamma + (1 - \gamma)(1 - z)}{\gamma}\big)^{-(1 + \eta)}$.
With $1 - F' \le e^{\varepsilon_1} (1 - F) + \delta(\varepsilon_1)$, the choice of ε₁ gives
$\gamma + (1 - \gamma)(1 - F') \le e^{\varepsilon_1} (\gamma + (1 - \gamma)(1 - F))$, and so
$\varphi'(F) \le e^{(1 + \eta) \varepsilon_1} \varphi'(F')$. Hence
$f \varphi'(F) - e^{\varepsilon'} f' \varphi'(F') \le
\varphi'(F) (f - e^{\varepsilon' - (1 + \eta) \varepsilon_1} f')$. Since
$\varphi'(F) \le \mathbb{E}[K]$, the integral of its positive part is at most
$\mathbb{E}[K] \, \delta(\varepsilon' - (1 + \eta) \varepsilon_1) = \delta$.

The proof follows Koskela, Redberg & Wang 2024 (arXiv 2402.06701).

**By Rényi divergence** (accountant rdp), for η ≥ 0. If Q has a Rényi divergence of at most
$\varepsilon(\lambda)$, then the search has at most, for every order $\hat\lambda$ (Papernot &
Steinke 2022, arXiv 2110.03620, Theorem 2),

$$\varepsilon'(\lambda) = \varepsilon(\lambda)
  + (1+\eta)\Big(1 - \frac{1}{\hat\lambda}\Big) \varepsilon(\hat\lambda)
  + \frac{(1+\eta) \log(1/\gamma)}{\hat\lambda} + \frac{\log \mathbb{E}[K]}{\lambda - 1}.$$

dp-accounting computes it (`RepeatAndSelectDpEvent`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from scipy import optimize

from bam.core import scalars
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import accounting, mechanisms, pld
from bam.privacy.accounting import PoissonSteps
from bam.privacy.mechanisms import Mechanism, OwnEvent

# The file that a search writes into the folder of the chosen trial alone.
CHOSEN = "chosen.json"
# Below, there is hardly a choice; above, the trials would take too long.
LEAST_TRIALS_MEAN, MOST_TRIALS_MEAN, MOST_TRIALS_SHAPE = 1.01, 10_000, 100
# Below this γ, a search may draw millions of trials.
LEAST_GAMMA = 1e-6
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
      trials_shape: η > -1; 0 is the logarithmic distribution, 1 the geometric one. At an equal
        mean, a smaller η costs less, but more of the searches have a single trial. At an equal
        chance that some trial has one of the best settings, η = 1 costs least or nearly so.
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
        if not -1 < self.trials_shape <= MOST_TRIALS_SHAPE:
            raise InputError(
                f"trials_shape must be above -1 (0: logarithmic, 1: geometric) and at most "
                f"{MOST_TRIALS_SHAPE}, got {self.trials_shape}"
            )
        if self.trials_shape < 0 and self.trials_mean > _mean(LEAST_GAMMA, self.trials_shape):
            raise InputError(
                f"trials_mean {self.trials_mean:g} with trials_shape {self.trials_shape:g} may "
                "draw millions of trials: take a smaller mean or a larger shape"
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

        lowest = math.log(LEAST_GAMMA)
        if self.trials_shape >= 0:  # the mean grows as 1/γ, so this γ is below the solution
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
        check=functools.partial(_check_trial, trials),
    )


def _check_trial(trials: Selection, unit: str, accountant: str, private: bool) -> None:
    _check_bound(trials, accountant)
    if not private:
        raise InputError("a private choice needs private runs")
    if unit == "user":
        raise InputError(
            "a private choice does not protect users, because scores count examples: use "
            "group_size 0"
        )


def _check_bound(selection: Selection, accountant: str) -> None:
    """Raises InputError unless the accountant bounds the search."""
    if accountant not in BOUNDS:
        raise InputError(f"a private choice needs accountant pld or rdp, not {accountant}")
    if accountant == "rdp" and selection.trials_shape < 0:
        raise InputError(
            f"accountant rdp needs trials_shape from 0, got {selection.trials_shape:g}: use "
            "accountant pld"
        )


@dataclasses.dataclass(frozen=True)
class TrialsDpEvent(OwnEvent):
    """A search over trials, each with T steps on Poisson batches and one noised score."""

    selection: Selection
    noise_multiplier: float
    sampling_prob: float
    num_steps: int

    def epsilon(self, delta: float, accountant: str) -> float:
        """Returns ε of the search, by PLD or RDP."""
        return epsilon(delta=delta, accountant=accountant, **vars(self))

    def least_noise(self, target_epsilon: float, delta: float, accountant: str) -> float:
        """Returns the smallest σ of a trial's training, see `noise_multiplier`."""
        return noise_multiplier(
            self.selection,
            target_epsilon=target_epsilon,
            delta=delta,
            sampling_prob=self.sampling_prob,
            num_steps=self.num_steps,
            accountant=accountant,
        )

    def as_dp_accounting(self) -> RepeatAndSelectDpEvent:
        """Returns the event in dp-accounting, which bounds it by RDP alone."""
        chosen = self.selection
        return RepeatAndSelectDpEvent(self.trial(), chosen.trials_mean, chosen.trials_shape)

    def trial(self) -> dp_accounting.DpEvent:
        """Returns the event of one trial in dp-accounting."""
        score = self.selection.score_noise_multiplier
        return _event(_trial(score, self.noise_multiplier, self.sampling_prob, self.num_steps))


def epsilon(
    selection: Selection,
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    accountant: str = "pld",
) -> float:
    """Returns ε of releasing only the best trial, with its setting and score.

    A trial has T steps of the Poisson-sampled Gaussian mechanism and one noised score. All trials
    have the same σ, q and T. `accountant` is "pld" or "rdp". The other arguments and errors are
    those of `accounting.epsilon`; "pld" must resolve δ / E[K], and "rdp" takes no η below 0.

    Examples:
      >>> run = dict(noise_multiplier=3.5, sampling_prob=0.1782, num_steps=100, delta=1e-5)
      >>> by = ("pld", "rdp")
      >>> [round(epsilon(Selection(8, 1, 10), accountant=x, **run), 2) for x in by]
      [3.34, 4.58]
    """
    steps = accounting.read_steps(sampling_prob, num_steps, delta)
    _check_bound(selection, accountant)
    accounting.check_steps(*steps, accountant)
    sigma = scalars.real("noise_multiplier", noise_multiplier)
    accounting.check_noise_multiplier(sigma)
    if sigma == 0 and steps[0] > 0 and steps[1] > 0:
        return math.inf
    return BOUNDS[accountant](selection, sigma, *steps)


@functools.lru_cache(maxsize=4096)
def by_pld(
    selection: Selection,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    spacing: float = pld.FINE,
) -> float:
    """Returns ε of the search by privacy profiles, from tables with this spacing."""
    trial = _trial(selection.score_noise_multiplier, noise_multiplier, sampling_prob, num_steps)
    share = delta / selection.trials_mean
    accounting.check_tables(trial, share)
    profile, error = pld.compose(trial, spacing)
    first = _epsilon_1(selection.gamma, profile, error)
    return (
        float(profile.get_epsilon_for_delta(share - error)) + (1 + selection.trials_shape) * first
    )


def epsilon_1(
    selection: Selection, noise_multiplier: float, sampling_prob: float, num_steps: int
) -> tuple[float, float]:
    """Returns ε₁ of the bound by privacy profiles, and the rounding error of its δ."""
    trial = _trial(selection.score_noise_multiplier, noise_multiplier, sampling_prob, num_steps)
    profile, error = pld.compose(trial)
    return _epsilon_1(selection.gamma, profile, error), error


def _epsilon_1(gamma: float, profile: PrivacyLossDistribution, error: float) -> float:
    def excess(epsilon: float) -> float:  # falls with ε; any ε at which it is not above 0 will do
        delta = min(1.0, float(profile.get_delta_for_epsilon(epsilon)) + error)
        return delta - math.expm1(epsilon) * gamma / (1 - gamma)

    # At log 1/γ, the second term is 1.
    first = float(optimize.brentq(excess, 0.0, -math.log(gamma) * (1 + 1e-9), xtol=1e-12))
    while excess(first) > -1e-13:  # so that late digits do not decide
        first += 1e-10
    return first


@functools.lru_cache(maxsize=4096)
def by_rdp(
    selection: Selection,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    orders: tuple[float, ...] | None = None,
) -> float:
    """Returns ε of the search by RDP at these orders, or at dp-accounting's."""
    best = TrialsDpEvent(selection, noise_multiplier, sampling_prob, num_steps).as_dp_accounting()
    with accounting.without_order_warnings():
        return float(RdpAccountant(orders).compose(best).get_epsilon(delta))


BOUNDS: dict[str, Callable[..., float]] = {"pld": by_pld, "rdp": by_rdp}


def noise_multiplier(
    selection: Selection,
    *,
    target_epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    accountant: str = "pld",
) -> float:
    """Returns the smallest σ of the trials' training that keeps the whole search within (ε, δ).

    ε is never above the target and at most a relative 1e-5 below it; by "pld" it is further below
    if a σ below 0.1 suffices, or if q · T ≤ δ / E[K]. InputError as in
    `accounting.noise_multiplier`, and if choosing and scoring trials leaves less than a tenth of
    the target for training.
    """
    target_epsilon = scalars.real("target_epsilon", target_epsilon)
    steps = accounting.read_steps(sampling_prob, num_steps, delta)
    accounting.check_search(target_epsilon, *steps[:2])
    names = ("sampling_prob", "num_steps", "delta")
    mechanism: JsonObject = dict(zip(names, steps, strict=True)) | {"accountant": accountant}
    # σ = ∞ leaves the cost of drawing and scoring trials.
    without_training = epsilon(selection, noise_multiplier=math.inf, **mechanism)
    if without_training > 0.9 * target_epsilon:
        raise InputError(
            f"the choice alone costs epsilon {without_training:.3g} of {target_epsilon:g}: take "
            "fewer trials on average, more noise on the score, or a larger epsilon"
        )

    def spent(sigma: float) -> float:
        return epsilon(selection, noise_multiplier=sigma, **mechanism)

    near = 1.0
    if accountant == "rdp":
        # A few orders bracket σ; all of them refine it. For a small target no noise is enough by a
        # few.
        few = lambda sigma: by_rdp(selection, sigma, *steps, accounting.FEW_ORDERS)  # noqa: E731
        if few(math.inf) <= 0.9 * target_epsilon:
            near = accounting.least_noise(few, target_epsilon, near, 1e-2)
    else:
        # A search costs more than one training at its share of δ, whose σ begins the bracket.
        one = mechanism | {"delta": steps[2] / selection.trials_mean}
        near = accounting.noise_multiplier(target_epsilon=target_epsilon, **one)
        # If δ covers all draws of an example, hardly any noise is needed, and tables are long.
        is_covered = steps[0] * steps[1] <= one["delta"]
        least = 1.0 if is_covered else accounting.LEAST_PLD_NOISE
        near = max(near, least)
        if near == least and spent(near) <= target_epsilon:
            return near
        spacing = min(pld.COARSE, target_epsilon / 50, steps[0] / near)
        if spacing > 5 * pld.FINE:  # otherwise it is hardly cheaper
            coarse = lambda sigma: by_pld(selection, sigma, *steps, spacing)  # noqa: E731
            near = accounting.least_noise(coarse, target_epsilon, near, 1e-3)
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
    trial = _event(_trial(score_noise_multiplier, noise_multiplier, sampling_prob, num_steps))
    accountants = {"pld": PLDAccountant, "rdp": RdpAccountant}
    if accountant not in accountants:
        raise InputError(f"unknown accountant {accountant!r}; choose from pld, rdp")
    with accounting.without_order_warnings():
        composed = accountants[accountant]().compose(trial, num_trials)
        return float(composed.get_epsilon(delta))


def _trial(
    score_noise_multiplier: float, noise_multiplier: float, sampling_prob: float, num_steps: int
) -> list[PoissonSteps]:
    """Returns the Gaussians of a training and of one noised score of its result."""
    score = PoissonSteps(score_noise_multiplier, 1.0, 1)
    if num_steps == 0 or sampling_prob == 0 or math.isinf(noise_multiplier):
        return [score]
    return [PoissonSteps(noise_multiplier, sampling_prob, num_steps), score]


def _event(trial: Sequence[PoissonSteps]) -> dp_accounting.DpEvent:
    """Returns a trial as an event of dp-accounting."""
    *training, score = trial
    noised_score = dp_accounting.GaussianDpEvent(score.noise_multiplier)
    if not training:
        return noised_score
    return dp_accounting.ComposedDpEvent([accounting.poisson_event(*training[0]), noised_score])


def _mean(gamma: float, shape: float) -> float:
    """E[K] of Definition 1: (1/γ - 1) / log(1/γ) if η = 0, else η (1/γ - 1) / (1 - γ^η)."""
    log = math.log(gamma)
    return math.expm1(-log) / (-log if shape == 0 else -math.expm1(shape * log) / shape)
