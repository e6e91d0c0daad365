"""The privacy of a run, decided before it starts: the record that sampler and accountant read."""

import dataclasses
import math
from typing import Any

from bam.privacy import mechanisms
from bam.privacy.accounting import rounded_down, rounded_up
from bam.privacy.mechanisms import ADJACENCIES, Mechanism

# Standard deviations of the noise that 32-bit floats hold with room to spare.
LEAST_NOISE_STD, MOST_NOISE_STD = 1e-30, 1e30


class BudgetExhaustedError(RuntimeError):
    """Raised instead of taking a step that the privacy plan does not cover."""


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The privacy of a run, fixed before its first step. All fields are public.

    Attributes:
      num_examples: N, the number of training examples, treated as public.
      expected_batch_size: l.
      sampling_prob: q = l/N.
      num_steps: the most steps the run may begin; ε covers them all.
      noise_multiplier: σ.
      clip_norm: C, which the clip makes its sensitivity S of.
      epsilon: ε after all T steps, at most the target; `inf` for a non-private run.
      delta: δ.
      accountant: "pld" or "rdp".
      adjacency: what neighbouring data sets differ in: "add_or_remove_one" or "replace_one".
      spare_steps: how many of these steps are a margin for steps that a crash loses.
      mechanism: how batches are drawn: "poisson", "fixed_size", "full_batch" or your own
        "MODULE:FUNCTION".
    """

    num_examples: int
    expected_batch_size: int
    sampling_prob: float
    num_steps: int
    noise_multiplier: float
    clip_norm: float
    epsilon: float
    delta: float
    accountant: str
    adjacency: str = "add_or_remove_one"
    spare_steps: int = 0
    mechanism: str = "poisson"

    @property
    def drawing(self) -> Mechanism:
        """The record that the sampler, the accountant and every statement read."""
        return mechanisms.make(self.mechanism, self.num_examples, self.expected_batch_size)

    @property
    def training_steps(self) -> int:
        """T, the steps that training takes: all but the spare ones."""
        return self.num_steps - self.spare_steps

    def epsilon_after(self, num_steps: int) -> float:
        """ε, at the plan's δ, spent once `num_steps` of its steps are begun, lost ones included.

        It is `inf` for a non-private run. Raises BudgetExhaustedError for more than planned.
        """
        self.check_steps(num_steps)
        if math.isinf(self.epsilon):  # no accountant of any mechanism is asked
            return math.inf if num_steps else 0.0
        return self.drawing.epsilon(
            noise_multiplier=self.noise_multiplier,
            num_steps=num_steps,
            delta=self.delta,
            accountant=self.accountant,
        )

    def check_steps(self, num_steps: int) -> None:
        """Raises BudgetExhaustedError for more steps begun than planned, lost ones included."""
        if num_steps > self.num_steps:
            raise BudgetExhaustedError(
                f"the privacy plan covers {self.num_steps} steps; step {num_steps} would spend "
                f"more than epsilon {self.epsilon:.4g}"
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as strict JSON values; an infinite ε is None."""
        fields = dataclasses.asdict(self)
        return {k: None if v == math.inf else v for k, v in fields.items()}

    def describe(self) -> str:
        """The plan in a few lines of plain text, for people."""
        if math.isinf(self.epsilon):
            clipping = "no clipping" if math.isinf(self.clip_norm) else f"clip {self.clip_norm:.4g}"
            return f"NOT PRIVATE: {clipping}, no noise; {self.training_steps} steps"
        epsilon, delta = rounded_up(self.epsilon, ".4g"), rounded_up(self.delta, ".3g")
        spare = f" and {self.spare_steps} spare ones" if self.spare_steps else ""
        return (
            f"({epsilon}, {delta})-DP, {self.accountant} accountant, "
            f"{ADJACENCIES[self.adjacency][0]} of {self.num_examples} examples\n"
            f"{self.training_steps} steps{spare}, {self.drawing.batches}\n"
            f"noise multiplier {rounded_down(self.noise_multiplier, '.4g')}, "
            f"clip norm {self.clip_norm:.4g}"
        )


def make_plan(
    *,
    num_examples: int,
    expected_batch_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    clip_norm: float,
    accountant: str = "pld",
    spare_steps: int = 0,
    mechanism: str = "poisson",
) -> PrivacyPlan:
    """Chooses the noise for a target (ε, δ) and fixes everything the guarantee depends on.

    The plan's ε is at most the target. The message of an error names the fix.

    Args:
      num_examples: N ≥ 1.
      expected_batch_size: l, from 1 to N.
      num_steps: the most steps the run may begin, ≥ 1.
      target_epsilon: ε > 0; `inf` plans a non-private run (σ = 0).
      delta: δ, positive and below 1/N.
      clip_norm: C.
      accountant: "pld" or "rdp". "gdp" is refused: it is no guarantee.
      spare_steps: how many of `num_steps` are a margin for steps that a crash loses, see
        `bam.ledger`; from 0 to one less.
      mechanism: how batches are drawn, see `bam.privacy.mechanisms.make`.

    Raises:
      ValueError: if an argument is out of range.
    """
    if not 1 <= expected_batch_size <= num_examples:
        raise ValueError(
            f"expected_batch_size {expected_batch_size} must be from 1 to the number of "
            f"training examples, {num_examples}"
        )
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not 0 <= spare_steps < num_steps:
        raise ValueError(f"spare_steps must be from 0 to {num_steps - 1}, got {spare_steps}")
    if not target_epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {target_epsilon}")
    if not 0 < delta < 1 / num_examples:
        raise ValueError(
            f"delta {delta} must be positive and below 1/N = {1 / num_examples:.2g}; "
            "a larger delta would allow publishing an example outright"
        )
    if target_epsilon < math.inf and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm must be a positive finite number, got {clip_norm}")
    if accountant == "gdp":
        raise ValueError("accountant gdp is asymptotic and no guarantee; plan with pld or rdp")
    drawing = mechanisms.make(mechanism, num_examples, expected_batch_size)
    steps = {"num_steps": num_steps, "delta": delta, "accountant": accountant}
    sigma, spent = 0.0, math.inf
    if target_epsilon < math.inf:
        sigma = drawing.noise_multiplier(target_epsilon=target_epsilon, **steps)
        spent = drawing.epsilon(noise_multiplier=sigma, **steps)
        noise_std = sigma * clip_norm / expected_batch_size
        if not LEAST_NOISE_STD <= noise_std <= MOST_NOISE_STD:
            raise ValueError(
                f"clip_norm {clip_norm} would need noise of {noise_std:.1g}, which 32-bit floats "
                "cannot hold; choose one nearer to 1"
            )
    return PrivacyPlan(
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        sampling_prob=expected_batch_size / num_examples,
        num_steps=num_steps,
        noise_multiplier=sigma,
        clip_norm=clip_norm,
        epsilon=spent,
        delta=delta,
        accountant=accountant,
        adjacency=drawing.adjacency,
        spare_steps=spare_steps,
        mechanism=mechanism,
    )
