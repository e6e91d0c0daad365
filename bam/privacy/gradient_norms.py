"""The norms of gradients as a private training knows them, from the noised means of a clip's slots.

They are post-processing of the noised sums, so ε covers them. `bam.core.slots` has the estimates.
"""

import math

import jax
import numpy as np

from bam.core import slots, strategy
from bam.core.clipping import ROUNDING
from bam.core.noise import CorrelatedNoiseState, rounding_share
from bam.core.slots import GradientNorms, SlotState
from bam.privacy.plan import PrivacyPlan
from bam.privacy.private_gradient import PrivateState


def gradient_norms(
    plan: PrivacyPlan, state: PrivateState, *, of_all_steps: bool = False
) -> GradientNorms | None:
    """Shares of gradients by their norm in the last step, or on average over all steps so far.

    They are of all N examples or users, at the weights of the step; if N is a public bound, those
    that are missing count as clipped. None before the first step, and for a clip without slots.
    """
    is_slots = lambda node: isinstance(node, SlotState)  # noqa: E731
    nodes = jax.tree.leaves(state.privatize.clip, is_leaf=is_slots)
    seen = next(filter(is_slots, nodes), None)
    if seen is None or not (num_steps := int(seen.num_steps)):
        return None
    # Two bounds that also hold if a resumed training began its noise anew.
    noise = strategy.noise_of(plan.mechanism.strategy, plan.num_steps)
    means, factor, num_averaged = seen.last, strategy.norm(noise), 1
    if of_all_steps:
        means, num_averaged = seen.total / num_steps, num_steps
        factor = float(np.max(np.abs(np.cumsum(noise)))) / math.sqrt(num_steps)
    fresh = plan.noise_multiplier * ROUNDING
    if isinstance(state.privatize.noise, CorrelatedNoiseState):  # whose noise covers its rounding
        num_entries = state.privatize.noise.past.shape[1]
        share = rounding_share(plan.noise_multiplier, plan.mechanism.strategy, num_entries)
        fresh /= 1 - float(share)
    return slots.gradient_norms(
        np.asarray(means),
        noise_std=fresh * factor * math.sqrt(len(means)) / plan.expected_batch_size,
        expected_batch_size=plan.expected_batch_size,
        sampling_prob=plan.mechanism.sampling_prob,
        num_steps=num_averaged,
    )
