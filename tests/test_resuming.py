"""A run that is stopped, killed and resumed ends as if nothing had happened, or pays for it."""

import functools
import json
import random
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam.privacy.plan import PrivacyPlan
from bam.training import loop
from configs import digits, extensions
from tests.cases import (
    Command,
    assert_same_bits,
    made_once,
    run_command,
    several_devices,
    stop_after,
    thoroughly,
    tiny_digits,
    write_parquet,
)
from tests.own_loop import DATA, PLAN
from tests.run_folder import begun, newest, releases, rows_of, saved_steps

NUM_STEPS = 5


# Runs of `bam train`.


class Variant(NamedTuple):
    """A run that is stopped, and what differs in the one that is not stopped."""

    changes: Mapping[str, object]
    method: str = "dp_sgd"
    seed: int | None = 3
    never_stopped: Mapping[str, object] = {}
    stops: Sequence[int] = (1, 3)
    num_devices: Sequence[int] = ()  # until each of the stops, and to the end; (): one


VIEWS = {"augment.views": 2, "augment.shift": 1}
SAT = VIEWS | {"ema_decay": 0.9}
BANDED = {"mechanism.name": "banded", "mechanism.bands": 3}
USERS = {"dataset.group_size": 3, "dataset.groups": "user", "expected_batch_size": 6}
USERS |= {"augment.flip": "horizontal", "augment.shift": 1}
STREAMED = USERS | {"dataset.memory": "stream"}
LOOKED_AT = {"diagnostics.every": 2, "diagnostics.num_examples": 8}
LOW_RANK = {"lora.rank": 2, "lora.targets": "Dense_0", "trainable": "lora", "ema_decay": 0.5}
VARIANTS = {
    "ordinary training": Variant({}, "non_private"),
    # DP-SAT carries most from step to step.
    "DP-SAT, views, EMA": Variant(SAT, "dp_sat", stops=range(NUM_STEPS)),
    "without a seed": Variant(SAT, "dp_sat", seed=None),
    "noise over bands, a frozen layer": Variant(BANDED | {"trainable": "Dense_1"}),
    "BAM, views": Variant(VIEWS, "bam_sam"),
    "streamed users": Variant(STREAMED),
}
MORE = {  # in `make test-all`
    "DP-SGD": Variant({}),
    "exact BAM, views, EMA": Variant(SAT, "bam_exact"),
    "low rank, EMA": Variant(LOW_RANK),
    "full batches": Variant({"mechanism.name": "full_batch", "expected_batch_size": 60}),
    "users in memory, looked at": Variant(USERS | LOOKED_AT),
    "streamed users as those in memory": Variant(
        STREAMED | LOOKED_AT, never_stopped={"dataset.memory": "device"}
    ),
    "other devices": Variant({}, "dp_sat", num_devices=(1, 4, 2)),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images of 4 × 4 pixels in three classes, of twenty users with three each."""

    def make(folder):
        rng = np.random.default_rng(5)
        for split, num in (("train", 60), ("test", 15)):
            pixels = rng.integers(0, 256, (num, 4, 4, 1), np.uint8)
            labels = (pixels.mean((1, 2, 3)) // 20).astype(int) % 3
            file = folder / f"{split}-00000-of-00001.parquet"
            users = {"user": np.arange(num) % 20}
            write_parquet(file, pixels, labels, names=["a", "b", "c"], **users)

    return made_once(tmp_path_factory, "images_of_users", make)


@functools.cache
def built(images, method, changes, num_devices):
    """Builds a trainer, once for all variants with the same arguments."""
    config = digits.get_config(method)
    config.update({"accountant": "rdp", "num_steps": NUM_STEPS, "expected_batch_size": 20})
    config.update({"microbatch_size": 10, "delta": 1e-3})
    config.eval.every = config.checkpoint.every = 1
    config.dataset.update({"name": "folder", "path": str(images), "memory": "device"})
    config.model.update({"name": "examples.own_model:mlp", "width": 4})
    config.update_from_flattened_dict(dict(changes))
    return loop.build(config, hardware=several_devices(num_devices))


def nothing_lost(line):
    """Of a run that goes on, it is all that there is to say."""
    assert re.fullmatch(r"continues from step \d+ of \d+", line), line


def stopped_and_resumed(trainers, seed, folder, stops):
    """A run that is stopped after each of these steps, and then let alone."""
    done = -1  # a new run is first asked at step 0
    for trainer, stop in zip(trainers, stops, strict=False):
        with pytest.raises(loop.StoppedError, match=f"after step {stop} of "):
            loop.train(trainer, seed, folder, should_stop=stop_after(stop - done - 1))
        done = stop
    return loop.train(trainers[-1], seed, folder, log=nothing_lost)


def without_keys(state):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        jax.device_get(state),
    )


def without_seconds(rows):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def ledger_of(folder):
    path = folder / "steps_begun"
    return path.read_bytes() if path.exists() else None


def assert_equal_runs(resumed, whole, seed):
    """Each a result and its folder. Without a seed what is drawn differs, and no cost does."""
    (ours, folder), (theirs, other) = resumed, whole
    assert rows_of(folder) == ours.rows
    assert ledger_of(folder) == ledger_of(other)
    assert (ledger_of(folder) is None) == (seed is not None or ours.summary["epsilon"] is None)
    for key in ("epsilon", "steps_begun", "steps_taken", "num_steps"):
        assert ours.summary[key] == theirs.summary[key]
    rows = [without_seconds(result.rows) for result in (ours, theirs)]
    if seed is None:
        cost = ("step", "steps_begun", "epsilon")
        rows = [[[row[key] for key in cost] for row in each] for each in rows]
    else:
        assert_same_bits(without_keys(ours.state), without_keys(theirs.state))
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "name",
    thoroughly([*VARIANTS, *MORE], *("DP-SAT, views, EMA", "noise over bands, a frozen layer")),
)
def test_a_run_that_is_stopped_twice_is_the_run_that_never_stopped(name, images, tmp_path):
    variant = (VARIANTS | MORE)[name]

    def trainer(num_devices=1, **changes):
        changed = tuple({**variant.changes, **changes}.items())
        return built(images, variant.method, changed, num_devices)

    alone = trainer(**variant.never_stopped)
    devices = variant.num_devices or [1] * (len(variant.stops) + 1)
    trainers = [trainer(num_devices) for num_devices in devices]
    programs = {x.step.__wrapped__.func for x in (alone, *trainers)}
    before = {program: program._cache_size() for program in programs}
    whole = loop.train(alone, variant.seed, tmp_path / "whole")
    resumed = stopped_and_resumed(trainers, variant.seed, tmp_path / "run", variant.stops)
    assert resumed.summary["num_devices"] == devices[-1]
    # Once for each program: what was restored is placed as what was not.
    assert all(program._cache_size() - before[program] <= 1 for program in programs)
    assert_equal_runs((resumed, tmp_path / "run"), (whole, tmp_path / "whole"), variant.seed)


# Loops of one's own.

IDS = np.arange(60) % 20  # of 20 users, with three rows each
OF_USERS = {"num_examples": 20, "expected_batch_size": 4, "groups": IDS, "group_size": 2}
EVERYBODY = {"mechanism": "full_batch", "expected_batch_size": 60, "num_epochs": 10}
BANDS = {"mechanism": {"name": "banded", "bands": 2}}
LOOPS = {  # what differs from the plan of tests/own_loop.py
    "on one device, then on eight": {},
    "without a seed": {"seed": None},
    "noise over bands": BANDS,
    "full batches": EVERYBODY,
    "batches by the epoch": {"mechanism": "random_allocation", "accountant": "pld"},
    "users": OF_USERS,
    "noise over bands on one device, then on eight": BANDS,
}


def transform(private):
    """The transform and `(params, average, state)` before the first step."""
    oracle = bam.dp_sat(lambda w, x: 0.5 * jnp.sum((w["in"] - x) ** 2) + w["out"] ** 2, 0.1)
    tx = optax.chain(private.gradient(oracle), optax.adam(0.1))
    params = {"in": jnp.zeros(2), "out": jnp.ones(())}
    return tx, (params, params, tx.init(params))


def taken(private, tx, tree, num):
    """After so many more steps, if they are left."""
    for _, batch in zip(range(num), private.batches(DATA), strict=False):
        params, average, state = tree
        updates, state = tx.update(batch, state, params)
        params = optax.apply_updates(params, updates)
        tree = params, optax.incremental_update(params, average, 0.1), state
    return tree


@pytest.mark.parametrize("name", thoroughly(LOOPS, "without a seed", "noise over bands"))
def test_an_own_loop_that_is_stopped_twice_is_the_one_that_never_stopped(name, tmp_path):
    settings = {**PLAN, "seed": 3, **LOOPS[name]}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    on_eight = {"mesh": mesh} if "eight" in name else {}
    never_stopped = bam.PrivateTraining(**settings)
    whole = taken(never_stopped, *transform(never_stopped), 10)

    private = bam.PrivateTraining(**settings)
    tx, tree = transform(private)
    private.save(tmp_path, tree)
    for stop, devices in ((1, {}), (5, on_eight)):
        tree = taken(private, tx, tree, stop - private.steps_begun)
        private.save(tmp_path, tree)
        if settings["seed"] is not None and stop > 1:
            taken(private, tx, tree, 2)  # and lost
        private.close()
        private = bam.PrivateTraining.resume(tmp_path, **settings, **devices)
        assert private.steps_begun == stop
        tx, tree = transform(private)
        tree = private.restore(tree)
    tree = taken(private, tx, tree, 10)
    private.close()
    assert private.steps_begun == never_stopped.steps_begun == private.plan.num_steps == 10
    assert private.epsilon_spent == never_stopped.epsilon_spent == private.plan.epsilon
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree[:2]))
    if settings["seed"] is None:  # what is drawn differs, and no cost does
        assert (tmp_path / "steps_begun").read_bytes() == b"." * 10
    else:
        assert not (tmp_path / "steps_begun").exists()
        assert_same_bits(jax.device_get(tree), jax.device_get(whole))


# Either.


def by_train(images, folder, seed):
    trainer = built(images, "dp_sgd", (), 1)
    return stopped_and_resumed([trainer] * 2, seed, folder, (2,)).summary["steps_taken"]


def by_an_own_loop(images, folder, seed):
    settings = PLAN | {"seed": seed, "num_epochs": 1}
    private = bam.PrivateTraining(**settings)
    tx, tree = transform(private)
    private.save(folder, taken(private, tx, tree, 2))
    private.close()
    private = bam.PrivateTraining.resume(folder, **settings)
    tx, tree = transform(private)
    taken(private, tx, private.restore(tree), NUM_STEPS)
    private.close()
    return private.steps_begun


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("door", [by_train, by_an_own_loop])
def test_without_a_seed_a_run_that_goes_on_draws_from_the_start_of_a_new_stream(
    door, seed, images, tmp_path, monkeypatch
):
    """Epochs and parts begin anew without a seed, and go on with one."""
    drawn, batch = [], PrivacyPlan.batch

    def note(plan, stream, step):
        drawn.append((stream, step))
        return batch(plan, stream, step)

    monkeypatch.setattr(PrivacyPlan, "batch", note)
    assert door(images, tmp_path / "run", seed) == NUM_STEPS
    streams, steps = zip(*drawn, strict=True)
    assert steps == ((1, 2, 3, 4, 5) if seed == 3 else (1, 2, 1, 2, 3))
    assert len(set(streams[:2])) == len(set(streams[2:])) == 1
    assert (streams[0] == streams[2]) == (seed == 3)


# Processes that are told to stop, or killed.

RANDOM_KILLS = [3, pytest.param(8, marks=pytest.mark.thorough)]


def counted(workdir, **settings):
    """`bam train` that notes the steps it computes in the file STEPS_LOG."""
    config = {"model.name": "linear", "accountant": "rdp", "eval.every": 1} | settings
    flags = [f"--config.{key}={value}" for key, value in config.items()]
    return ["tests.counted_train", "--config=configs/digits.py:dp_sgd", f"--workdir={workdir}",
            *flags]  # fmt: skip


def wait_for(process, condition):
    while not condition():
        process.check_runs()
        time.sleep(0.002)


@pytest.mark.thorough
@pytest.mark.parametrize("kills", RANDOM_KILLS)
def test_a_process_that_is_told_to_stop_and_killed_shows_no_more_steps_than_its_ledger_has(
    kills, tmp_path
):
    """Without a seed. The first kill meets a save, the others any moment."""
    workdir, log, moments = tmp_path / "run", tmp_path / "log", random.Random(kills)
    settings = {"num_steps": 20 * kills, "spare_steps": 3 * kills, "checkpoint.every": 4}
    planned = settings["num_steps"] + settings["spare_steps"]
    environ = {"STEPS_LOG": str(log), "JAX_NUM_CPU_DEVICES": "1"}
    seen, printed = set(), []
    log.touch()
    for way in ("stop", "while saving", *["kill"] * (kills - 1), "let alone"):
        environ["KILL_SAVING"] = "2" if way == "while saving" else "0"
        saved = saved_steps(workdir) if workdir.exists() else []
        size = log.stat().st_size + 5 * moments.randint(0, 3)  # "step" and a line's end
        with Command(*counted(workdir, **settings), **environ) as process:
            if way in ("stop", "kill"):
                wait_for(process, lambda size=size: log.stat().st_size > size)
                time.sleep(moments.random() / 50)
                process.send_signal(signal.SIGTERM if way == "stop" else signal.SIGKILL)
            done = process.wait()
        expected = {"stop": 3, "let alone": 0}.get(way, -signal.SIGKILL)
        assert done.returncode == expected, done.stderr
        seen |= releases(workdir)
        computed = log.read_text().count("step")
        assert len(seen) <= computed <= begun(workdir) <= planned
        assert (workdir / "summary.json").exists() == (way == "let alone")
        if way in ("stop", "let alone"):
            goes_on = [
                int(x) for x in re.findall(r"^continues from step (\d+) of", done.stdout, re.M)
            ]
            assert goes_on == saved[-1:] or (goes_on == [] and saved[-1] == planned)
        if way == "stop":
            assert "the same command continues it" in done.stdout
            assert computed == begun(workdir) == saved_steps(workdir)[-1]  # nothing was lost
        printed += re.findall(r"^step +([0-9]+)  epsilon ([0-9.]+)", done.stdout, re.M)
    summary = json.loads((workdir / "summary.json").read_text())
    lost = begun(workdir) - summary["steps_taken"]
    assert summary["steps_begun"] == begun(workdir)
    assert summary["steps_taken"] == min(settings["num_steps"], planned - lost)
    assert (f"{lost} steps were lost in a crash" in done.stdout) == (lost > 1)
    assert f"test accuracy {summary['test_accuracy']:.2%}" in done.stdout
    rows = {row["step"]: row["epsilon"] for row in rows_of(workdir)}
    last = re.findall(r"^step +([0-9]+)  epsilon ([0-9.]+)", done.stdout, re.M)
    assert len(last) >= 4 and len({step for step, _ in printed} - {"0"}) <= computed
    assert all(rows[int(step)] <= float(epsilon) for step, epsilon in last)  # rounded up
    if kills > 3:
        assert computed > summary["steps_taken"]  # the kills did lose some


@pytest.mark.parametrize("kills", RANDOM_KILLS)
def test_an_own_loop_that_is_killed_takes_no_step_beyond_its_plan_and_no_noise_twice(
    kills, tmp_path
):
    """Each step's noise, of gradients that are zero, is in a log when it was seen."""
    log, moments = tmp_path / "log", random.Random(kills)
    log.touch()
    for _ in range(kills):
        size = log.stat().st_size + 8 * moments.randint(0, 6)
        with Command("tests.own_loop", str(tmp_path)) as process:
            wait_for(process, lambda size=size: log.stat().st_size > size)
            time.sleep(moments.random() / 200)
            process.check_runs()
            process.send_signal(signal.SIGKILL)
    with Command("tests.own_loop", str(tmp_path)) as process:
        assert process.wait().returncode == 0
    noise = [log.read_bytes()[i : i + 8] for i in range(0, log.stat().st_size, 8)]
    counted = begun(tmp_path / "run")
    assert 20 < len(noise) <= counted == 100 and len(set(noise)) == len(noise)


@pytest.mark.thorough
def test_a_run_with_a_seed_that_is_killed_while_it_saves_ends_as_if_never_stopped(tmp_path):
    """Every step is saved, so most kills meet a save. A damaged checkpoint is named, no more."""
    workdir, moments = tmp_path / "run", random.Random(0)
    settings = {"num_steps": 400, "eval.every": 20, "model.name": "linear", "accountant": "rdp"}
    settings["model.width"] = 16  # as below
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    command = ["bam", "train", "--config=configs/digits.py:dp_sat", f"--workdir={workdir}", *flags]
    command += ["--config.seed=0", "--config.checkpoint.every=1"]
    for number in (signal.SIGTERM, *[signal.SIGKILL] * 8):
        before = max(saved_steps(workdir), default=0)
        with Command(*command, JAX_NUM_CPU_DEVICES="1") as process:
            wait_for(process, lambda: max(saved_steps(workdir), default=0) >= before + 2)  # noqa: B023
            time.sleep(moments.uniform(0, 0.1))
            process.check_runs()
            process.send_signal(number)
            process.wait()
        assert max(saved_steps(workdir)) >= before + 2  # what was saved is still there

    last = newest(workdir)
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    damaged = run_command(*command)
    assert damaged.returncode == 2 and damaged.stderr.count("\n") == 1
    assert f"{last} could not be read" in damaged.stderr
    last.unlink()  # the one before it serves

    trainer = loop.build(tiny_digits("dp_sat", num_steps=400, eval__every=20))
    resumed, whole = loop.train(trainer, 0, workdir), loop.train(trainer, 0)
    assert_same_bits(without_keys(resumed.state), without_keys(whole.state))
    assert without_seconds(resumed.rows) == without_seconds(whole.rows)
    assert len(whole.rows) == 20


# Worked extensions.

OWN = sorted({*extensions.EXTENSIONS} - {"dp_sgd", "bam_sam"})


@pytest.mark.thorough
@pytest.mark.parametrize("name", OWN)
def test_an_extension_is_trained_from_its_config_stopped_twice_or_not(name, tmp_path):
    config = extensions.get_config(name)
    config.model.name, config.accountant, config.num_steps = "linear", "rdp", 15
    config.checkpoint.every = 5
    trainer = loop.build(config)
    whole = loop.train(trainer, 0, tmp_path / "whole")
    assert whole.summary["test_accuracy"] > 0.3
    assert whole.summary["epsilon"] <= 3.0
    assert whole.summary["sensitivity"] == pytest.approx(1.0, abs=0.05)
    if name == "adaptive":
        assert float(whole.state.private.privatize.clip) != 1.0 and whole.summary["sensitivity"] > 1
    resumed = stopped_and_resumed([trainer] * 3, 0, tmp_path / "run", (1, 7))
    assert_equal_runs((resumed, tmp_path / "run"), (whole, tmp_path / "whole"), 0)
