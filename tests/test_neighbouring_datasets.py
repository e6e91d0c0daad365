"""Who neighbours are: one example replaced by nothing, or added and removed under a public N."""

import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import bam
from bam.cli import run_lines
from bam.core import sampling
from bam.data import datasets
from bam.data.datasets import Dataset, Split
from bam.data.stream import StoredImages
from bam.privacy import accounting, pld, statement, tradeoff
from bam.privacy.mechanisms import ADJACENCIES
from bam.training import examples, loop
from configs import digits
from tests.cases import recomputed, thoroughly, without_mu

RNG = np.random.default_rng(0)
PLAN = {
    "num_steps": 20,
    "epsilon": 2.0,
    "delta": 1e-5,
    "accountant": "rdp",
}
BEST_OF_THREE = {
    "name": "best_of_trials", "trials_mean": 3.0, "trials_shape": 1.0,
    "score_noise_multiplier": 8.0,
}  # fmt: skip
PIXELS = RNG.integers(0, 256, (1280, 8, 8, 1)).astype(np.uint8)
LABELS = RNG.integers(0, 10, 1280).astype(np.int32)


def config_of(**changes):
    config = digits.get_config("dp_sgd")
    config.model.name = "linear"
    config.update_from_flattened_dict(
        {"num_epochs": 10, "expected_batch_size": 256, "accountant": "rdp"} | changes
    )
    return config


def data_of(num_rows, streamed=False):
    images = PIXELS[:num_rows]
    if streamed:
        from PIL import Image

        files = []
        for image in images:
            Image.fromarray(image[..., 0]).save(png := io.BytesIO(), "png")
            files.append(png.getvalue())
        images = StoredImages(files.__getitem__, (8, 8, 1), np.arange(num_rows), str, lambda: b"x")
    test = Split(PIXELS[:40], LABELS[:40])
    ones = np.ones(1, np.float32)
    return Dataset("mine", Split(images, LABELS[:num_rows]), test, 10, ones, ones)


def first_rows(built, batch_of):
    rows = built.place_rows()
    return next(rows.read(batch_of, range(1, 2)))


def structure(folder):
    """The files of a run, with the keys of its records."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"[0-9a-f]{32}", "x", str(path.relative_to(folder)))
        if "tfevents" in name or path.is_dir():
            continue
        text = path.read_text() if path.suffix in (".json", ".jsonl") else ""
        found[name] = text if name == "plan.json" else re.sub(r"[\d.e+-]+", "0", text)
    return found


def trained(num_rows, folder, streamed=False, **changes):
    """The plan, the compilations and the folder of a run on so many rows."""
    built = loop.build(config_of(num_steps=2, **changes), data_of(num_rows, streamed))
    compiled = []

    def count(name, seconds, **fields):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    batch_of = lambda step: built.plan.batch(0, step)  # noqa: E731
    shapes = [
        jax.tree.map(jnp.shape, first_rows(built, batch_of)),
        jax.eval_shape(lambda: built.init(0)),
    ]
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        loop.train(built, 0, folder)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    return built.plan, shapes, len(compiled), structure(folder)


@pytest.mark.parametrize(
    "streamed", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["memory", "streamed"]
)
def test_under_a_public_number_one_row_changes_no_plan_shape_compilation_or_file(
    tmp_path, streamed
):
    given = {"num_examples": 1300, "streamed": streamed}
    whole, less = (trained(n, tmp_path / str(n), **given) for n in (1280, 1279))
    assert whole == less
    assert whole[0].num_examples == 1300 and whole[0].adjacency == "add_or_remove_one"
    assert whole[2] > 0


def test_without_a_public_number_one_row_changes_the_plan():
    plans = [loop.build(config_of(), data_of(n)).plan for n in (1280, 1279)]
    assert [plan.num_steps for plan in plans] == [50, 40]
    assert plans[0].sampling_prob != plans[1].sampling_prob
    assert plans[0].noise_multiplier != plans[1].noise_multiplier
    assert {plan.adjacency for plan in plans} == {"zero_out"}
    given = [loop.build(config_of(num_examples=1280), data_of(n)).plan for n in (1280, 1279)]
    assert given[0] == given[1] and given[0].num_steps == 50


def test_empty_places_add_nothing_and_rows_are_drawn_as_by_a_plan_of_all_places():
    built = loop.build(config_of(num_examples=1300), data_of(1200))
    whole = built.plan.batch(3, 1)
    rows, mask = first_rows(built, lambda step: whole)
    indices = np.asarray(rows["row"])
    empty = np.asarray(whole.mask) & (np.asarray(whole.indices) >= 1200)
    assert empty.any()  # else nothing was tested
    assert np.array_equal(mask, whole.mask & ~empty)
    assert np.array_equal(indices[mask], whole.indices[mask])
    assert set(indices[~mask].tolist()) == {sampling.PADDING}


VIEWS = {"augment.views": 2, "augment.shift": 2, "augment.flip": "horizontal"}


def moved_by_removing_row_0(is_drawn, users, monkeypatch, by_number=False):
    """Returns by how many S a step's sum moves, for one noise and one key of views.

    The other rows keep their places.
    """
    size, unit = (3, {"dataset.group_size": 3}) if users else (1, {})
    config = config_of(num_examples=90, expected_batch_size=30, **VIEWS | unit)
    with config.unlocked():
        config.method = ConfigDict({"name": "examples.random_smoothing:oracle", "radius": 0.5})
    if by_number:  # the control: views and the oracle's key follow the row's number
        in_order = examples.in_order

        def numbered(rows):
            rows, data = in_order(rows)
            return rows | {"place": rows["row"]}, data

        monkeypatch.setattr(examples, "in_order", numbered)
    drawn = np.concatenate([[0] * is_drawn, 2 * np.arange(1, 40)]).astype(np.int32)
    places = RNG.permutation(60)[: len(drawn)]
    gradients = []
    for removed in (0, 1):
        data = data_of(80 * size)
        data = data._replace(train=Split(*(x[removed * size :] for x in data.train)))
        if users:
            data = data._replace(users=np.arange(removed * size, 80 * size) // size)
        built = loop.build(config, data)
        indices = np.full(60, sampling.PADDING, np.int32)
        indices[places] = np.where(drawn >= removed, drawn - removed, sampling.PADDING)
        batch = sampling.PaddedBatch(indices, indices != sampling.PADDING)
        state = built.init(0)
        state = built.step(state, built.batch(state, batch))
        gradients.append(state.private.previous)
    difference = jax.tree.map(lambda a, b: a - b, *gradients)
    moved: float = 30 * float(optax.tree.norm(difference)) / built.sensitivity
    return moved


@pytest.mark.parametrize("users", [False, True], ids=["examples", "users"])
def test_under_a_public_number_a_removed_row_leaves_the_views_of_later_rows(users, monkeypatch):
    """Whatever the key of the views is: ε does not rest on it."""
    assert moved_by_removing_row_0(False, users, monkeypatch) == 0
    assert 0 < moved_by_removing_row_0(True, users, monkeypatch) <= 1 + 1e-4
    assert moved_by_removing_row_0(False, users, monkeypatch, by_number=True) > 3  # the control


def test_a_public_number_below_the_number_of_rows_is_refused_in_one_line():
    with pytest.raises(ValueError, match="num_examples is 1279, but there are 1280") as error:
        loop.build(config_of(num_examples=1279), data_of(1280))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="num_examples must be at least 1"):
        loop.build(config_of(num_examples=0), data_of(1280))


def test_of_users_the_public_number_counts_users():
    data = data_of(1280)._replace(users=np.arange(1280) // 4)
    users = {"dataset.group_size": 4, "expected_batch_size": 64}
    plan = loop.build(config_of(num_examples=330, **users), data).plan
    assert (plan.num_examples, plan.unit, plan.adjacency) == (330, "user", "add_or_remove_one")
    assert "add/remove one of at most 330 users" in without_mu(plan).describe()
    with pytest.raises(ValueError, match="num_examples is 319, but there are 320 users"):
        loop.build(config_of(num_examples=319, **users), data)


def test_blank_rows_fill_a_split_up_to_the_public_number():
    split = Split(PIXELS[:3], LABELS[:3])
    filled = datasets.pad_split(split, 5)
    assert (filled.images.shape, filled.labels.shape) == ((5, 8, 8, 1), (5,))
    assert not filled.images[3:].any() and np.array_equal(filled.images[:3], split.images)
    assert datasets.pad_split(split, 3) is split


PRIVATE = {"num_examples": 100, "expected_batch_size": 50, "num_epochs": 2, "epsilon": 2.0}
PRIVATE |= {"delta": 1e-3, "accountant": "rdp", "seed": 0}


def training(**given):
    return bam.PrivateTraining(**PRIVATE | {"clip": bam.clip_by_l2_norm(2.0)} | given)


def updates_of(rows, **given):
    private = training(**given)
    tx = private.gradient(bam.dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2)))
    w, found = jnp.zeros(2), []
    state = tx.init(w)
    for batch in private.batches(rows):
        update, state = tx.update(batch, state, w)
        found.append(np.asarray(update))
    return private, found


def test_private_training_with_a_given_number_takes_fewer_rows():
    private, fewer = updates_of(np.ones((90, 2), np.float32), num_examples_given=True)
    assert private.plan.adjacency == "add_or_remove_one" and len(fewer) == 4
    blank = np.concatenate([np.ones((90, 2)), np.full((10, 2), np.nan)]).astype(np.float32)
    _, dropped = updates_of(blank)  # rows that are dropped add nothing: the same sums
    assert all(np.array_equal(a, b) for a, b in zip(fewer, dropped, strict=True))
    for rows, given in ((90, False), (101, True), (101, False)):
        with pytest.raises(ValueError, match="the plan is for 100 examples"):
            next(iter(training(num_examples_given=given).batches(np.ones((rows, 2)))))
    counted = training()
    next(iter(counted.batches(np.ones((100, 2)))))
    assert counted.plan.adjacency == "zero_out"


def test_a_plan_knows_no_clip_and_the_record_of_a_run_does():
    run, wider = (loop.build(config_of(clip_norm=x), data_of(1280)) for x in (0.3, 30.0))
    assert run.plan == wider.plan
    assert not {"clip_norm", "sensitivity"} & run.plan.to_json().keys()
    for built, bound in ((run, 0.3), (wider, 30.0)):
        assert built.record == built.plan.to_json() | {"clip_norm": bound, "sensitivity": bound}
    assert ", clip norm 0.3\n" in run_lines.describe_plan(run)


def test_the_plan_names_a_clip_of_ones_own_and_its_sensitivity():
    config = config_of(clip_norm=0.5)
    config.clip.name = "examples.automatic_clipping:clip"
    words = run_lines.describe_plan(loop.build(config, data_of(1280)))
    assert ", clip examples.automatic_clipping:clip of norm 0.5\n" in words
    with config.unlocked():
        config.clip = ConfigDict({"name": "tests.test_neighbouring_datasets:longer", "factor": 3.0})
    words = run_lines.describe_plan(loop.build(config, data_of(1280)))
    assert ", clip tests.test_neighbouring_datasets:longer of norm 0.5, sensitivity 1.5\n" in words


def longer(plan, clip_norm, factor):
    """A clip whose sensitivity is not C."""
    return bam.clip_by_l2_norm(factor * clip_norm)


def test_the_noise_that_floats_cannot_hold_is_that_of_the_sensitivity():
    config = config_of()
    with config.unlocked():
        config.clip = ConfigDict({"name": "tests.test_neighbouring_datasets:longer", "factor": 3.0})
    built = loop.build(config, data_of(1280))
    assert (built.record["clip_norm"], built.record["sensitivity"]) == (1.0, 3.0)
    config.clip.factor = 1e35  # σC is in range, σS is not
    with pytest.raises(ValueError, match="32-bit floats hold"):
        loop.build(config, data_of(1280))
    with pytest.raises(ValueError, match="32-bit floats hold"):
        training(clip=bam.clip_by_l2_norm(1e35))


@pytest.mark.parametrize("batch_size", [40, 1000], ids=["sampled", "whole"])
def test_a_record_of_the_last_version_is_refused_and_one_of_this_says_who_neighbours_are(
    batch_size,
):
    plan = bam.make_plan(num_examples=1000, expected_batch_size=batch_size, **PLAN)
    record = plan.to_json()
    assert record["adjacency"] == "zero_out"
    assert bam.PrivacyPlan.from_json(record) == plan
    old = {k: v for k, v in record.items() if k != "num_examples_given"}
    old["adjacency"] = "add_or_remove_one"
    with pytest.raises(ValueError, match=r"records of bam 0\.1 and 0\.2 are no longer read"):
        bam.PrivacyPlan.from_json(old)
    settings = {"expected_batch_size": batch_size, "num_examples_given": True, **PLAN}
    new = bam.make_plan(num_examples=1000, **settings)
    assert bam.PrivacyPlan.from_json(new.to_json()) == new
    assert new.adjacency == "add_or_remove_one" and new.epsilon == plan.epsilon
    # The stronger claim needs the constant.
    with pytest.raises(ValueError, match="contradicts itself"):
        bam.PrivacyPlan.from_json(new.to_json() | {"num_examples_given": False, "adjacency": "x"})


# Records.


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": math.inf},
        {"noise_multiplier": 1e7},
        {"noise_multiplier": 0.0},
        {"num_examples_given": 1},
        {"delta": 0.002},
        {"num_steps": 0},
        {"group_size": 3},
    ],
    ids=str,
)
def test_a_record_that_make_plan_would_not_make_is_refused(changes):
    record = bam.make_plan(num_examples=1000, expected_batch_size=40, **PLAN).to_json()
    bam.PrivacyPlan.from_json(record)
    with pytest.raises(ValueError):
        bam.PrivacyPlan.from_json(record | changes)


def test_the_printed_lines_of_a_reordered_plan_give_its_epsilon():
    settings = {**PLAN, "mechanism": BEST_OF_THREE}
    record = bam.make_plan(num_examples=1000, expected_batch_size=40, **settings).to_json()
    turned = dict(reversed(record.items()))
    turned["mechanism_options"] = dict(reversed(record["mechanism_options"].items()))
    plan = bam.PrivacyPlan.from_json(json.loads(json.dumps(turned)))
    plan.check_epsilon()
    assert recomputed(statement.text_of(fields_of(plan))) == pytest.approx(
        record["epsilon"], rel=1e-4
    )


# μ of Gaussian DP.


@pytest.mark.parametrize(
    ("sigma", "prob", "steps"), thoroughly([(1.5, 0.04, 500), (2.7, 0.18, 100)], (2.7, 0.18, 100))
)
def test_mu_bounds_the_whole_profile_and_is_hardly_above_the_least(sigma, prob, steps):
    mechanism = {"noise_multiplier": sigma, "sampling_prob": prob, "num_steps": steps}
    epsilon = accounting.epsilon(delta=1e-5, **mechanism)
    mu = pld.mu(*mechanism.values(), up_to=epsilon)
    at = np.linspace(0, epsilon, 77)
    deltas = np.array(accounting.deltas(epsilons=at.tolist(), **mechanism))
    assert np.all(deltas <= tradeoff.delta_of_mu(mu, at))
    assert not np.all(deltas <= tradeoff.delta_of_mu(0.997 * mu, at))  # the control
    f = accounting.poisson_tradeoff(up_to=1.5 * epsilon, **mechanism)
    alpha = np.linspace(0, 1, 501)
    assert np.all(f(alpha) >= tradeoff.gaussian_tradeoff(mu)(alpha) - 2e-5)
    assert np.any(f(alpha) < tradeoff.gaussian_tradeoff(0.95 * mu)(alpha) - 2e-5)  # likewise


def test_mu_of_gaussians_without_sampling_is_exact():
    assert pld.mu(2.0, 1.0, 16, up_to=1.0) == 2.0
    almost = pld.mu(2.0, 1 - 1e-9, 16, up_to=accounting.epsilon(
        noise_multiplier=2.0, sampling_prob=1.0, num_steps=16, delta=1e-5
    ))  # fmt: skip
    assert 2.0 <= almost < 2.0 * 1.003


# The statement.


def fields_of(plan):
    from bam.training import config as base

    config = base.get_config("dp_sgd").to_dict()
    summary = {
        "clip_norm": 1.0, "sensitivity": 1.0, "seed": None, "noise_key": "operating system",
        "noise": "", "sampling": plan.mechanism.sampling, "device": "cpu", "commit": "1d4e",
        "versions": {"dp-accounting": "0.6.0"},
    }  # fmt: skip
    words = {"data": "data", "diagnosed": False, "exported_by": "bam"}
    return statement.fields_of_run(config, plan, summary, **words)


def row_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(f"| {name}"))


def test_a_statement_says_the_neighbours_that_hold():
    settings = {"num_examples": 1000, "expected_batch_size": 40, **PLAN}
    counted = fields_of(without_mu(bam.make_plan(**settings)))
    given = fields_of(without_mu(bam.make_plan(**settings, num_examples_given=True)))
    for fields, is_given, adjacency in (
        (counted, False, "zero_out"),
        (given, True, "add_or_remove_one"),
    ):
        assert (fields["num_examples_given"], fields["adjacency"]) == (is_given, adjacency)
        words = f"one example {statement.render(fields, 'neighbours')}"
        assert words == ADJACENCIES[adjacency][1].format(unit="example")


def test_a_statement_shows_this_training_s_own_limit_before_that_of_epsilon_and_delta():
    plan = bam.make_plan(num_examples=1000, expected_batch_size=40, **{**PLAN, "num_steps": 500})
    fields = fields_of(plan)
    text = statement.text_of(fields)
    alarm, own, alone = (float(x) for x in row_of(text, "1 |").strip("| ").split("|"))
    event = plan.dp_event._asdict()
    f = accounting.poisson_tradeoff(up_to=max(1.0, 1.5 * plan.epsilon), **event)
    exact = 100 * (1 - float(f(np.array([0.01]))[0]))
    assert exact <= own <= exact * 1.002 and alarm == 1
    assert alone == pytest.approx(100 * statement.most_power(plan.epsilon, 1e-5, 0.01), rel=1e-3)
    assert own < 0.9 * alone
    assert f"| {fields['mu']} | {plan.mu} |" in row_of(text, "μ of Gaussian DP")
    assert plan.mu <= float(fields["mu"]) <= plan.mu * 1.001


def test_batches_of_an_allocation_are_stated_as_they_are_drawn():
    pytest.importorskip("PLD_accounting")
    settings = {**PLAN, "mechanism": "random_allocation", "num_steps": 4, "accountant": "pld"}
    plan = bam.make_plan(num_examples=1437, expected_batch_size=480, **settings)
    fields = fields_of(plan)
    text = statement.text_of(fields)
    assert row_of(text, "N/b").endswith("| 718.5 |") and row_of(text, "q = 1/b").endswith("| 0.5 |")
    assert row_of(text, "l, ").endswith("| 480 |") and fields["q_is"] == "1/b"
    assert plan.mu is None and not fields["mu_known"] and not fields["own_limit"]
    assert "0.334" not in text
    assert len(row_of(text, "1 |").strip("| ").split("|")) == 2  # of ε and δ alone
    sizes = [len(plan.mechanism.draw(0, step)) for step in range(1, 41)]
    assert np.mean(sizes) == 718.5
    poisson = bam.make_plan(num_examples=1437, expected_batch_size=480, **PLAN)
    poisson = fields_of(without_mu(poisson))
    assert (poisson["q_is"], poisson["exact_q"]) == ("l/N", 480 / 1437)
