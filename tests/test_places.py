"""A row's place tells nothing of the others: what removing one changes, in the code users run."""

import collections
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from scipy import stats

import bam
from bam.core import places, sampling
from bam.privacy.plan import make_plan

ROOT = Path(__file__).parents[1]
LEVEL = 1e-6


def seen_by_users(*arguments):
    """What `tests.removed_row` prints without the flags of these tests."""
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-m", "tests.removed_row", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_sums(sums):
    """One row moves the sum by S at most, and by 40 S where rows are packed, as in 0.2.0.dev0.

    The control says nothing on a processor whose code is the same at every place.
    """
    for size, moved in sums.items():
        assert moved["clipped_sum"] <= 1 + 1e-4, size
        assert moved["loop"] <= 1 + 1e-4, size
        if "control" in moved:
            assert moved["control"] > 20, size
            assert moved["loop control"] > 0.9, size


def check_rows(rows, num_losses):
    """The others' numbers do not change when a row is removed, whatever the loss."""
    assert len(rows) == num_losses
    assert not any(rows.values()), rows


def test_position_says_nothing_of_others_and_bounds_hold_in_compiled_form():
    """The control of the bounds is a gradient that is not in memory before it is bounded."""
    found = seen_by_users()
    bounds = found["bounds"]
    control = bounds.pop("control")  # on a processor that fuses products and sums
    # The compiler of 0.11 does not fuse across that barrier, so there the control says nothing.
    assert control > 1 + 1e-3 or not jaxlib.__version__.startswith("0.10.")
    assert max(bounds.values()) <= 1 + 1e-5, bounds
    check_sums(found["sums"])
    check_rows(found["rows"], num_losses=3)


@pytest.mark.slow
def test_position_says_nothing_of_others_at_any_microbatch_size_and_of_convolutions():
    """Sizes around those of the registers, in which code for the last rows may be another."""
    found = seen_by_users(*["1", "8", "10", "17", "33", "100"])
    check_sums(found["sums"])
    check_rows(found["rows"], num_losses=3)


# The law of the places.

NOISE = bam.gaussian_noise(bam.clip_by_l2_norm(1.0), 1.0, bam.seeded_key(0))
DRAWS = 4000


@functools.cache
def engines_places(is_there, group_size=2, num_devices=1):
    """Of many draws: in each the place of the rows that are there, in their order."""

    @jax.jit
    @jax.vmap
    def drawn(step):
        noise = bam.GaussianNoise(NOISE.key, 1.0, step)
        return places.draw(noise, jnp.asarray(is_there), group_size, num_devices)

    found = []
    for rows in np.asarray(drawn(jnp.arange(DRAWS, dtype=jnp.uint32))).tolist():
        by_group = np.reshape(rows, (-1, group_size, num_devices))
        of_row = {int(row): int(place) for (_, place, _), row in np.ndenumerate(by_group)}
        found.append(tuple(of_row[row] for row in np.flatnonzero(is_there).tolist()))
    return found


def pads_places(num_rows):
    found = []
    for step in range(1000):
        batch = sampling.pad(np.arange(num_rows), 5, 3, step)
        found.append(tuple(np.argsort(batch.indices, stable=True)[:num_rows].tolist()))
    return found


def same_law(one, other):
    """A χ² test of homogeneity."""
    counts = [collections.Counter(found) for found in (one, other)]
    cells = sorted(counts[0] | counts[1])
    table = np.array([[c[cell] for cell in cells] for c in counts])
    if table.shape[1] == 1:
        return True
    return stats.chi2_contingency(table).pvalue > LEVEL


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_law_of_the_others_positions_is_the_same_without_a_row(num_devices):
    """Also where the batch is packed anew without it. The control: packed rows stay packed."""
    whole = engines_places((True,) * 4 + (False,), num_devices=num_devices)
    others = [places[1:] for places in whole]
    masked = engines_places((False, True, True, True, False), num_devices=num_devices)
    packed_anew = engines_places((True, True, True, False, False), num_devices=num_devices)
    assert same_law(others, masked)
    assert same_law(others, packed_anew)
    assert len(set(others)) > 4
    in_order = [(1, 2, 3)] * DRAWS, [(0, 1, 2)] * DRAWS
    assert not same_law(*in_order)


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_the_law_of_padded_positions_is_the_same_without_a_row():
    assert same_law([places[1:] for places in pads_places(4)], pads_places(3))
    assert not same_law([places[:2] for places in pads_places(2)], [(0, 1)] * 1000)


def test_every_row_is_summed_once_whatever_the_places_and_devices():
    mask = jnp.asarray(np.random.default_rng(0).random(101) < 0.7)
    for group_size, num_devices in ((1, 1), (1, 3), (7, 1), (7, 4), (101, 1)):
        rows = np.asarray(places.draw(NOISE, mask, group_size, num_devices))
        assert len(rows) % (group_size * num_devices) == 0
        assert sorted(rows[rows < 101].tolist()) == list(range(101))


@jax.custom_batching.custom_vmap
def place(row):
    return 0 * row


@place.def_vmap
def place_in_microbatch(size, is_mapped, rows):
    return jnp.arange(size, dtype=rows.dtype), True


def test_a_sum_with_noise_has_its_rows_at_drawn_places():
    """A gradient as long as its place in the microbatch shows it in the norms."""
    clip, in_order = bam.clip_by_l2_norm(1.0), (1, 2, 3, 1, 2, 3)

    def places_of(noise):
        of_place = bam.clipped_sum(
            lambda w, row: 1 + place(row), clip, jnp.zeros(()), jnp.zeros(6),
            mask=None, microbatch_size=3, noise=noise,
        )  # fmt: skip
        return tuple(np.asarray(of_place[1]).astype(int).tolist())

    noises = [bam.gaussian_noise(clip, 1.0, NOISE.key, step) for step in range(8)]
    found = [places_of(noise) for noise in noises]
    assert all(sorted(places) == sorted(in_order) for places in found)
    assert len(set(found)) > 4
    assert places_of(None) == in_order  # the control: nothing is hidden, and nothing drawn


# What it costs.


@pytest.mark.parametrize(("size", "most"), [(1, 1.0), (4, 1.04), (16, 1.1), (64, 1.1), (100, 1.1)])
def test_positions_cost_few_more_rows_than_packing(size, most):
    """At the paper's batch, 4096 of 50,000: rows at the fullest place over those when packed."""
    plan = make_plan(
        num_examples=50_000, expected_batch_size=4096, num_steps=900, epsilon=2.0,
        delta=1e-5, accountant="rdp",
    )  # fmt: skip
    random = np.random.default_rng(0)
    drawn = np.minimum(random.binomial(50_000, plan.sampling_prob, 500), plan.capacity)
    seats = [-(-plan.capacity // size)] * size  # of each place
    fullest = [random.multivariate_hypergeometric(seats, rows).max() for rows in drawn]
    assert np.mean(fullest) <= most * np.mean(np.ceil(drawn / size))


# What of δ covers draws that outgrow their rows.


def test_the_overflow_of_all_steps_is_a_thousandth_of_delta_and_is_accounted():
    plan = make_plan(
        num_examples=50_000, expected_batch_size=4096, num_steps=900, epsilon=2.0,
        delta=1e-5, accountant="rdp",
    )  # fmt: skip
    others_fill = stats.binom.sf(plan.capacity - 1, 50_000, plan.sampling_prob)
    assert 900 * others_fill <= plan.overflow == 1e-8
    mechanism = {"sampling_prob": plan.sampling_prob, "num_steps": 900, "accountant": "rdp"}
    epsilon = functools.partial(bam.epsilon, noise_multiplier=plan.noise_multiplier, **mechanism)
    assert plan.epsilon == epsilon(delta=1e-5 - 1e-8) > epsilon(delta=1e-5)
