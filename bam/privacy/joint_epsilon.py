"""The privacy of several runs together."""

from collections.abc import Sequence

from bam.core import scalars
from bam.errors import InputError
from bam.privacy import accounting
from bam.privacy.plan import PrivacyPlan


def joint_epsilon(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Returns an upper bound, by PLD, of ε at a given δ of several runs together on the same data.

    The privacy losses of all planned steps are composed. At the sum of the plans' δ the result is
    at most the sum of their ε, and usually much less. At a smaller δ it may be more. The runs must
    have independent batches and noise: no seed, or different seeds. A plan does not say that.

    Raises an InputError if there is no plan, a plan is not private, its ε does not come from
    Poisson-sampled Gaussians (random allocation, a private search), plans have different units or
    neighbours, or δ is not above the plans' total `overflow` and below 1/N.

    Examples:
      >>> from bam import make_plan
      >>> plan = make_plan(num_examples=1000, expected_batch_size=100, num_steps=10,
      ...                  epsilon=2.0, delta=1e-5)
      >>> 2.0 < joint_epsilon([plan, plan], delta=1e-5) < 3.0
      True
    """
    delta, steps = scalars.real("delta", delta), []
    if not plans:
        raise InputError("the joint epsilon needs at least one plan")
    for plan in plans:
        if not plan.private:
            raise InputError("a run without privacy has no epsilon: leave it out")
        if (event := plan.dp_event) is None:
            raise InputError(
                f"the privacy loss of mechanism {plan.mechanism_name} is not composed with others: "
                "add up the epsilons, and the deltas"
            )
        steps.append(event)
    for name in ("unit", "adjacency"):
        if len(different := {getattr(plan, name): None for plan in plans}) > 1:
            raise InputError(
                f"these plans do not protect the same: their {name} is {' and '.join(different)}; "
                "their epsilons are not one number, so give plans with one of them"
            )
    # Draws of each run may exceed its capacity; δ must cover all of them.
    overflow = sum(plan.overflow for plan in plans)
    most = 1 / max(plan.num_examples for plan in plans)
    if not overflow < delta < most:
        raise InputError(
            f"delta must be above {overflow:.3g} and below 1/N = {most:.2g}, got {delta}"
        )
    return accounting.joint_epsilon(steps, delta - overflow)
