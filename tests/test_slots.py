"""Slots beside a clipped gradient: the bound holds with them, and their figures are right."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import signal

import bam
from bam.audit import canary, checks, whole_run
from bam.cli import clip_norm
from bam.core import clipping, slots
from bam.core.noise import GaussianNoiseState
from bam.core.private_mean import PrivatizeState
from bam.core.slots import SlotState
from bam.privacy.clip_words import in_words
from bam.privacy.gradient_norms import gradient_norms
from bam.privacy.private_gradient import PrivateState
from bam.release import export, records, report
from bam.training import config as base
from bam.training import loop
from tests import own_loop, runs
from tests.audits import canary_config
from tests.cases import assert_same_bits, mesh_of, refused, stop_after, thoroughly

SIZES = (2, 8, 256)
CLIP_NORMS = (1.0, 0.7, 2e-12, 2.5e6)


# The bound.


def gradients(clip_norm):
    """Rows of 20 entries: of all lengths, most near C, of equal entries, and not finite."""
    rng = np.random.default_rng(5)
    directions = rng.normal(size=(1500, 20)) * 10.0 ** rng.uniform(-4, 0, (1500, 20))
    directions[::3] = 1.0  # all entries are rounded alike
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    near = 1 + rng.choice([-1, 1], 700) * 10.0 ** rng.uniform(-8, -1, 700)
    lengths = np.concatenate([near, rng.uniform(0, 1, 500), 10.0 ** rng.uniform(-6, 3, 300)])
    rows = (clip_norm * lengths[:, None] * directions).astype(np.float32)
    special = np.full((5, 20), clip_norm, np.float32)
    special[:, 3] = [np.nan, np.inf, 0, 3e38, 1e-30]
    return np.concatenate([rows, special, np.zeros((1, 20), np.float32)])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _bounded(clip_norm, rows, num_slots, room):
    clip = bam.clip_by_l2_norm(clip_norm, slack=num_slots)
    return jax.vmap(lambda g: clip.update({"w": g}, clip.init(None))[0])(rows)


def bounded(clip_norm, num_slots):
    """The gradients and their slots as the clip returns them, in one program for all C."""
    # The room is structure here, so that another one compiles another program.
    found = _bounded(np.float32(clip_norm), gradients(clip_norm), num_slots, slots.ROUNDING_ROOM)
    return np.asarray(found.grads["w"]), np.asarray(found.slots)


def longest(clip_norm, num_slots):
    """The largest of ‖(g, slots)‖ / C, of which nothing is rounded but the result."""
    rows = np.concatenate(bounded(clip_norm, num_slots), axis=1).astype(float)
    assert np.isfinite(rows).all()
    # A float64 holds the square of a float32 exactly, and `fsum` rounds once.
    return max(math.sqrt(math.fsum(x * x for x in row)) / clip_norm for row in rows.tolist())


@pytest.mark.parametrize("num_slots", SIZES)
@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
def test_a_gradient_with_its_slots_is_no_longer_than_the_clip_norm(clip_norm, num_slots):
    clip_norm = float(np.float32(clip_norm))
    assert 0.999 < longest(clip_norm, num_slots) <= 1 + 6e-6 < clipping.ROUNDING


def test_slots_that_take_more_than_the_room_are_noticed(monkeypatch):
    monkeypatch.setattr(slots, "ROUNDING_ROOM", -1e-3)
    assert longest(1.0, 8) > clipping.ROUNDING


def test_a_slot_is_empty_unless_every_rounding_leaves_the_gradient_as_it_is():
    clipped, beside = bounded(1.0, 8)
    rows = gradients(1.0)
    is_filled = beside.max(axis=1) > 0
    np.testing.assert_array_equal(clipped[is_filled], rows[is_filled])
    norms = np.linalg.norm(rows[is_filled].astype(float), axis=1)
    assert is_filled.sum() > 500 and 0.999 < norms.max() < 1 - 1.4e-5


@pytest.mark.parametrize("num_slots", SIZES)
def test_slots_are_filled_from_the_first_and_tell_the_squared_norm(num_slots):
    for norm in (0.0, 0.3, 0.8, 0.99, 1.0, 2.0, math.nan, math.inf):
        beside = np.asarray(slots.beside(jnp.float32(norm), 1.0, num_slots))
        filled = beside * math.sqrt(num_slots)
        room = num_slots * max(0.0, 1 - norm**2) if norm < 1 else 0.0
        np.testing.assert_allclose(filled.sum(), room, atol=1e-4 * num_slots)
        assert (np.diff(filled) <= 0).all() and np.sum((filled > 1e-5) & (filled < 1 - 1e-5)) <= 1


@pytest.mark.thorough
def test_the_kit_passes_a_clip_with_slots():
    bam_testing = pytest.importorskip("bam.testing")
    bam_testing.check_transform(bam.clip_by_l2_norm(0.7, slack=8), keeps_structure=False)
    clip = bam.clip_by_l2_norm(0.7, slack=8)
    smaller = bam.BoundedTransformation(clip.init, clip.update, 0.69, clip.finish)
    with pytest.raises(AssertionError, match="above its sensitivity"):  # the control
        bam_testing.check_transform(smaller, keeps_structure=False)


# What does not change.


def test_without_slots_clip_and_record_are_as_before():
    plain = bam.clip_by_l2_norm(0.7)
    assert type(plain) is type(bam.clip_by_l2_norm(0.7, slack=0)) is clipping.ClipByL2Norm
    assert in_words(plain) == "bam.core.clipping.ClipByL2Norm(clip_norm=0.7)"
    assert in_words(bam.clip_by_l2_norm(0.7, slack=8)).endswith("(clip_norm=0.7, num_slots=8)")


def test_slots_change_no_bit_of_the_clipped_gradient_nor_the_sensitivity():
    plain = bam.clip_by_l2_norm(0.7)
    rows = gradients(0.7)
    expected = jax.jit(jax.vmap(lambda g: plain.update({"w": g}, None)[0]["w"]))(rows)
    for num_slots in SIZES:
        assert_same_bits(bounded(0.7, num_slots)[0], expected)
        assert bam.clip_by_l2_norm(0.7, slack=num_slots).sensitivity == 0.7


@pytest.mark.usefixtures("without_the_tests_type_checks")
@pytest.mark.parametrize("bad", [1, -1, 257, 2.0, 2.5, True, "8", math.nan])
def test_a_bad_number_of_slots_is_refused_in_one_line(bad):
    with pytest.raises(bam.InputError, match=r"^slack must be ") as refused:
        bam.clip_by_l2_norm(1.0, slack=bad)
    assert "\n" not in str(refused.value)


def test_slots_without_a_finite_bound_are_refused():
    with pytest.raises(bam.InputError, match="slack needs a finite clip_norm"):
        bam.clip_by_l2_norm(math.inf, slack=8)


# The figures. A population of norms, of which batches are drawn.


def population(number):
    """Norms in units of C, spread around another centre each time."""
    rng = np.random.default_rng(number)
    return rng.uniform(0.5, 1.6) * rng.lognormal(0, 0.5, 3000)


NUM, EXPECTED = 3000, 300


@jax.jit
def _noised_slots(key, sigma, rows, mask, step):
    clip = bam.clip_by_l2_norm(2.0, slack=8)
    noise = bam.gaussian_noise(clip, sigma, key, step=step)
    total, _ = bam.clipped_sum(
        lambda w, x: x, clip, jnp.zeros(3), rows, mask=mask, noise=noise, microbatch_size=512
    )
    mean = jax.tree.map(lambda x: x / EXPECTED, total)
    return clip.finish(mean, clip.init(None))[1].last


@functools.cache
def simulated(sigma, num_steps=200):
    """The noised means of slots of a step of each population, by the engine, and the norms."""
    key, rng, found = bam.seeded_key(3), np.random.default_rng(4), []
    for step in range(num_steps):
        norms = population(step)
        drawn = norms[rng.random(NUM) < EXPECTED / NUM]
        directions = rng.normal(size=(len(drawn), 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        rows = np.zeros((512, 3), np.float32)
        rows[: len(drawn)] = 2.0 * drawn[:, None] * directions
        mask = np.arange(512) < len(drawn)
        means = _noised_slots(key, np.float32(sigma), rows, mask, np.uint32(step))
        found.append((np.asarray(means), norms))
    return found


def coverage(sigma, change_means=lambda m: m, **changes):
    """How often an interval holds the true share: of gradients clipped, and of each norm."""
    settings = {
        "noise_std": sigma * math.sqrt(8) / EXPECTED,
        "expected_batch_size": EXPECTED,
        "sampling_prob": EXPECTED / NUM,
    } | changes
    held = []
    for means, norms in simulated(sigma):
        seen = slots.gradient_norms(change_means(means), **settings)
        true = [np.mean(norms >= 1), *(np.mean(norms >= r) for r in seen.norms)]
        shares = zip((seen.clipped, *seen.at_least), true, strict=True)
        held.append([x.low <= t <= x.high for x, t in shares])
    return np.mean(held, axis=0)


@pytest.mark.parametrize("sigma", [1.0, 8.0])
def test_intervals_hold_the_true_shares(sigma):
    assert coverage(sigma).min() >= 0.9


@pytest.mark.parametrize(
    ("sigma", "changes"),
    [
        (8.0, {"noise_std": 0.0}),  # without the noise
        (1.0, {"sampling_prob": 1.0}),  # without the draw
        (1.0, {"change_means": lambda m: m * 8 / 7}),  # another unit
        (1.0, {"change_means": lambda m: m[::-1]}),  # the last slot is filled first
        (1.0, {"change_means": lambda m: np.append(m[1:], 0)}),  # the next cell
    ],
    ids=["no noise", "no draw", "unit", "order", "cell"],
)
def test_wrong_figures_do_not_hold_them(sigma, changes):
    assert coverage(sigma, **changes).min() < 0.9


def test_a_mean_of_slots_is_the_share_of_longer_gradients_averaged_over_a_cell():
    norms = population(1)
    for num_slots in (2, 8):
        of_norm = functools.partial(slots.beside, clip_norm=1.0, num_slots=num_slots)
        beside = jax.vmap(of_norm)(jnp.float32(norms))
        found = 1 - np.mean(beside, axis=0) * math.sqrt(num_slots)
        grid = (np.arange(1000 * num_slots) + 0.5) / (1000 * num_slots)
        longer = np.mean(norms[:, None] ** 2 >= 1 - grid, axis=0).reshape(num_slots, 1000)
        np.testing.assert_allclose(found, longer.mean(axis=1), atol=1e-3)


def plan_of(mechanism, num_steps=12, **options):
    return bam.make_plan(
        num_examples=NUM, expected_batch_size=NUM if mechanism == "full_batch" else EXPECTED,
        num_steps=num_steps, epsilon=3.0, delta=1e-5,
        mechanism={"name": mechanism, **options},
    )  # fmt: skip


def state_after(plan, num_slots, norms, seed):
    """A state after the steps of a plan, with means of slots that are drawn and noised here."""
    rng = np.random.default_rng(seed)
    filled = np.clip(num_slots * (1 - norms[:, None] ** 2) - np.arange(num_slots), 0, 1)
    means = np.stack(
        [
            filled[plan.mechanism.draw(seed, step)].sum(axis=0) / plan.expected_batch_size
            for step in range(1, plan.num_steps + 1)
        ]
    )
    fresh = rng.normal(size=means.shape)
    noise = signal.lfilter([1.0], plan.mechanism.strategy, fresh, axis=0)
    means += plan.noise_multiplier * math.sqrt(num_slots) / plan.expected_batch_size * noise
    seen = SlotState(means[-1], means.sum(axis=0), np.int32(plan.num_steps))
    noise_state = GaussianNoiseState(np.zeros(8, np.uint32), np.int32(plan.num_steps))
    return PrivateState(PrivatizeState(seen, noise_state), None, None, None, {})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mechanism", "options"),
    [("poisson", {}), ("banded", {"bands": 4}), ("random_allocation", {}), ("full_batch", {})],
    ids=["poisson", "banded", "random_allocation", "full_batch"],
)
def test_the_average_over_a_run_is_held_too_and_its_interval_is_shorter(mechanism, options):
    plan = plan_of(mechanism, **options)
    held, ratios = [], []
    for seed in range(50):
        norms = population(seed)
        state = state_after(plan, 8, norms, seed)
        one, run = (gradient_norms(plan, state, of_all_steps=x) for x in (False, True))
        for seen in (one, run):
            true = [np.mean(norms >= 1), *(np.mean(norms >= r) for r in seen.norms)]
            both = zip((seen.clipped, *seen.at_least), true, strict=True)
            held.append([x.low <= t <= x.high for x, t in both])
        lengths = [sum(x.high - x.low for x in seen.at_least) for seen in (one, run)]
        ratios.append(lengths[0] / lengths[1])
    assert np.mean(held[::2], axis=0)[0] >= 0.9 and np.mean(held[1::2], axis=0)[0] >= 0.9
    assert np.median(ratios) > 2


# Where the figures appear.

PARAMS = {"head": {"kernel": jnp.zeros(2)}, "body": {"kernel": jnp.zeros(3)}}


def loss(params, x):
    """Whose gradient is the example but for what is frozen."""
    return jnp.sum(params["head"]["kernel"] * x) + jnp.sum(params["body"]["kernel"])


DATA = np.linspace(-2, 2, 240, dtype=np.float32).reshape(120, 2)


def trained(num_steps=None, folder=None, slack=8, tree=None, **changes):
    """A training of few steps with a clip of slots, and what its loop carries."""
    plan = {
        "num_examples": 120, "expected_batch_size": 40, "num_epochs": 2, "epsilon": 8.0,
        "delta": 1e-3, "accountant": "rdp", "seed": 0, "clip": bam.clip_by_l2_norm(1.0, slack),
    }  # fmt: skip
    private = bam.PrivateTraining(**(plan | changes), folder=folder)
    tx = optax.chain(private.gradient(bam.dp_sgd(loss)), optax.adam(0.1))
    tree = PARAMS, tx.init(PARAMS)
    tree = private.restore(tree) if folder is not None else tree
    for number, batch in enumerate(private.batches(DATA), 1):
        updates, state = tx.update(batch, tree[1], tree[0])
        tree = optax.apply_updates(tree[0], updates), state
        if folder is not None:
            private.save(folder, tree)
        if number == num_steps:
            break
    private.close()
    return private, tree


VARIANTS = {
    "plain": {},
    "frozen weights": {"trainable": "head"},
    "users": {
        "groups": np.arange(120) // 2, "group_size": 2, "num_examples": 60,
        "expected_batch_size": 20,
    },
    "banded": {"mechanism": {"name": "banded", "bands": 2}},
    "random_allocation": {"mechanism": "random_allocation", "accountant": "pld"},
    "all examples": {"mechanism": "full_batch", "expected_batch_size": 120, "num_epochs": 3},
    "a chain": {"clip": bam.chain(optax.scale(1.0), bam.clip_by_l2_norm(1.0, slack=8))},
    "devices": {},
}  # fmt: skip


ALWAYS = ("plain", "frozen weights", "users", "banded", "devices")


@pytest.mark.parametrize("name", thoroughly(list(VARIANTS), *ALWAYS))
def test_a_training_tells_the_share_clipped_and_its_optimizer_sees_no_slots(name):
    mesh = {"mesh": mesh_of(2)} if name == "devices" else {}
    private, (params, state) = trained(**VARIANTS[name], **mesh)
    assert jax.tree.structure(params) == jax.tree.structure(PARAMS)
    shapes = {x.shape for x in jax.tree.leaves(state[1])}
    assert shapes <= {(), (2,), (3,)}
    for of_all_steps in (False, True):
        seen = private.gradient_norms(state, of_all_steps=of_all_steps)
        assert len(seen.at_least) == len(seen.norms) == 8
        assert 0 <= seen.clipped.low <= seen.clipped.value <= seen.clipped.high <= 1


def test_with_all_examples_and_little_noise_the_figure_is_the_share():
    changes = VARIANTS["all examples"] | {"epsilon": 200.0, "trainable": "head"}
    private, (_, state) = trained(**changes, slack=64)
    norms = np.linalg.norm(DATA, axis=1)  # the loss is linear, so they are the same in each step
    seen = private.gradient_norms(state, of_all_steps=True)
    assert seen.clipped.high - seen.clipped.low < 0.1
    assert seen.clipped.low <= np.mean(norms >= 1) <= seen.clipped.high
    for r, share in zip(seen.norms, seen.at_least, strict=True):
        np.testing.assert_allclose(share.value, np.mean(norms >= r), atol=0.05)


def test_a_gradient_that_is_not_finite_counts_as_clipped():
    broken = np.where(np.arange(240).reshape(120, 2) < 120, np.nan, 0.0).astype(np.float32)
    changes = VARIANTS["all examples"] | {"epsilon": 200.0, "trainable": "head"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "DATA", broken)
        private, (params, state) = trained(**changes)
    assert np.isfinite(params["head"]["kernel"]).all()
    seen = private.gradient_norms(state)
    np.testing.assert_allclose(seen.clipped.value, 0.5, atol=0.02)


def test_a_resumed_training_has_the_figures_of_one_that_was_not_stopped(tmp_path):
    _, (_, whole) = trained()
    trained(num_steps=3, folder=tmp_path / "run")
    private, (_, resumed) = trained(folder=tmp_path / "run")
    assert_same_bits(whole[0].privatize.clip, resumed[0].privatize.clip)
    assert private.gradient_norms(resumed).clipped == private.gradient_norms(whole).clipped
    with pytest.raises(bam.InputError, match=r"clip.*num_slots"):
        trained(folder=tmp_path / "run", slack=4)


def test_without_slots_or_before_the_first_step_there_is_no_figure():
    private, (_, state) = trained(slack=0)
    with pytest.raises(bam.InputError, match="no noised slots"):
        private.gradient_norms(state)
    private, _, (_, state) = own_loop.begin(clip=bam.clip_by_l2_norm(1.0, slack=8))
    with pytest.raises(bam.InputError, match="after a step"):
        private.gradient_norms(state)


def test_slots_of_a_repeated_batch_are_nan_where_traced():
    private, tx, (params, state) = own_loop.begin(clip=bam.clip_by_l2_norm(1.0, slack=8))
    batch = next(private.batches(own_loop.DATA))
    step = jax.jit(lambda b, s, p: tx.update(b, s, p)[1][0].privatize.clip)
    after = tx.update(batch, state, params)[1]
    assert np.isfinite(after[0].privatize.clip.last).all()
    again = step(batch, after, params + 1)
    assert np.isnan(again.last).all() and np.isnan(again.total).all()


@pytest.mark.thorough
def test_the_statement_of_an_own_loop_says_what_the_slots_tell(tmp_path):
    private, _ = trained()
    private.write_statement(tmp_path / "PRIVACY.md", "numbers")
    assert "| slots beside a clipped gradient | " in (tmp_path / "PRIVACY.md").read_text()
    private, _ = trained(slack=0)
    private.write_statement(tmp_path / "PRIVACY.md", "numbers")
    assert "slots" not in (tmp_path / "PRIVACY.md").read_text()


# `bam train` and what is published.


def tiny(**overrides):
    config = runs.tiny(**overrides)
    base.name_part(config, "clip", "l2", slack=8)
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with slots, a row after each."""
    folder = tmp_path_factory.mktemp("slots") / "run"
    config = tiny(**{"eval.every": 1, "checkpoint.every": 1, "clip_norm": 0.5})
    loop.train(loop.build(config, runs.own_data()), None, folder)
    return folder


def test_rows_and_summary_have_the_shares_with_their_intervals(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        names = [key for key in row if key.startswith("private/")]
        assert len(names) == 3 * 9 and "private/share_above_0.968_low" in names
        low, value, high = (row[f"private/share_clipped{x}"] for x in ("_low", "", "_high"))
        assert 0 <= low <= value <= high <= 1
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["gradient_norms"]) == 9
    low, high = summary["gradient_norms"]["share_clipped"][1:]
    assert high - low < rows[-1]["private/share_clipped_high"]


@pytest.mark.thorough
def test_the_release_states_the_share_and_that_it_was_computed_from_the_data(run, tmp_path):
    export.export(run, tmp_path / "release")
    text = (tmp_path / "release" / "PRIVACY.md").read_text()
    low = json.loads((run / "summary.json").read_text())["gradient_norms"]["share_clipped"][1]
    assert f"(95 % interval: {100 * low:.1f} % to " in text
    assert 'data, but the\nshare of gradients clipped (under "Facts"), which ε covers; it' in text
    assert "| 8 slots |" in text
    stated = json.loads((tmp_path / "release" / "config.json").read_text())
    assert stated["clip"] == {"name": "l2", "slack": 8}


@pytest.mark.thorough
@pytest.mark.parametrize("public", [False, True])
def test_the_page_shows_the_figures_to_everybody(run, public):
    text = report.page(records.read(run), public=public, made_by="bam")
    assert "<h2>Norms of gradients</h2>" in text and "so ε covers them" in text
    assert "Gradients of at least a norm, over all steps" in text
    if public:
        assert "But for the norms of gradients, which ε covers, nothing on it" in text
    assert "not_private" not in text or not public


def test_a_public_page_of_a_seeded_run_leaves_them_out(run):
    read = records.read(run)
    seeded = dataclasses.replace(read, summary=read.summary | {"seed": 0})
    assert seeded.nominal and not read.nominal
    text = report.page(seeded, public=True, made_by="bam")
    assert "The ε in this file is nominal" in text and "Nothing on it was computed" in text
    assert "Norms of gradients" not in text and "gradients clipped" not in text
    assert "Norms of gradients" in report.page(seeded, public=False, made_by="bam")


@pytest.mark.thorough
def test_the_page_of_an_unfinished_run_shows_its_last_step(run, tmp_path):
    config = tiny(**{"eval.every": 1, "checkpoint.every": 1})
    with pytest.raises(loop.StoppedError):
        trainer = loop.build(config, runs.own_data())
        loop.train(trainer, None, tmp_path / "run", should_stop=stop_after(1))
    text = report.page(records.read(tmp_path / "run"), public=True, made_by="bam")
    assert "Gradients of at least a norm, in step 1" in text


@pytest.mark.parametrize(
    "norms",
    [None, [], {}, {"share_clipped": 3}, {"share_above_x": [1, 2, 3]}, {"share_clipped": []}],
)
def test_a_damaged_record_of_shares_breaks_neither_page_nor_statement(run, norms):
    read = records.read(run)
    read = dataclasses.replace(read, summary=read.summary | {"gradient_norms": norms})
    assert "<h2>Norms of gradients</h2>" in report.page(read, public=True, made_by="bam")
    assert "share of gradients clipped" not in export.statement_of(read, "bam")


def test_a_run_without_slots_has_none_of_it():
    result = loop.train(runs.trainer(), runs.SEED)
    assert "gradient_norms" not in result.summary
    assert not any(key.startswith("private/") for row in result.rows for key in row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.slack": 1}, "clip.slack must be 0"),
        ({"clip.slack": -8}, "clip.slack must be 0"),
        ({"clip.slack": 257}, "clip.slack must be 0"),
    ],
)
def test_a_config_with_a_bad_number_of_slots_is_refused_before_data_are_read(changes, message):
    config = tiny()
    config.update_from_flattened_dict(changes)
    with pytest.raises(bam.InputError, match=message):
        loop.build(config)  # whose data set does not exist


@pytest.mark.parametrize("clip", ["normalize", "per_layer"])
def test_other_clips_have_no_slots_and_say_so(clip):
    config = runs.tiny()
    with pytest.raises(bam.InputError, match=r"no option 'slack'.*--config.clip.name=l2"):
        base.name_part(config, "clip", clip, slack=8)


@pytest.mark.thorough
def test_the_audit_finds_noise_and_batches_as_planned_with_slots():
    def built(slack):
        config = canary_config("dp_sgd", 20, 120)
        base.name_part(config, "clip", "l2", slack=slack)
        data = canary.canary_dataset(80, num_classes=10, num_features=36)
        return loop.build(config, data)

    for slack in (0, 8):
        trainer = built(slack)
        found = whole_run.p_values(trainer, [whole_run.record(trainer, 0)])
        assert checks.failures(found, 1e-3) == []


# Advice.


def seen(means, **changes):
    settings = {"noise_std": 0.01, "expected_batch_size": 1e4, "sampling_prob": 0.1} | changes
    return slots.gradient_norms(means, **settings)


def test_advice_names_a_clip_norm_only_where_the_median_was_seen():
    assert "try C = 1.28" in slots.advice(seen([0.9, 0.8, 0.45, 0.2]), 2.0)
    many = slots.advice(seen([0.2, 0.15, 0.1, 0.0]), 2.0)
    assert "their median norm is above C = 2" in many and "try" not in many
    half = slots.advice(seen([0.52, 0.5, 0.3, 0.1]), 2.0)
    assert "C = 2 may be their median norm" in half and "try" not in half
    hidden = slots.advice(seen([0.95, 0.9, 0.8, 0.6]), 2.0)
    assert "hides" in hidden and "try" not in hidden


# What a run tells of the next C.


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_shares_go_through_a_summary_unchanged():
    norms = slots.gradient_norms(
        [0.9, 0.8, 0.45, 0.2], noise_std=0.01, expected_batch_size=1e4, sampling_prob=0.1
    )
    record = json.loads(json.dumps({name: list(x) for name, x in slots.as_shares(norms).items()}))
    assert slots.of_shares(record) == norms
    for damaged in ({}, {"share_clipped": [1.0]}, {"share_clipped": "x"}, {**record, "y": [1]}):
        refused("these are not shares", slots.of_shares, damaged)


def test_a_finished_run_says_which_norm_half_of_its_gradients_have(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    refused("has no summary.json", clip_norm.advise, folder)
    (folder / "summary.json").write_text("{}")
    refused("train with --config.clip.slack=8", clip_norm.advise, folder)
    means = [0.9, 0.8, 0.45, 0.2]
    large = {"noise_std": 0.01, "expected_batch_size": 1e4, "sampling_prob": 0.1}
    norms = slots.gradient_norms(means, **large)
    shares = {name: list(x) for name, x in slots.as_shares(norms).items()}
    (folder / "summary.json").write_text(json.dumps({"gradient_norms": shares}))
    (folder / "config.json").write_text(json.dumps({"clip_norm": 2.0}))
    clip_norm.advise(folder)
    lines = capsys.readouterr().out
    assert slots.advice(norms, 2.0) in lines.replace("\n", " ") and "adds its own ε" in lines
