"""Finished runs of one tiny model, each trained once for all tests: who reads one takes a copy.

They share a trainer, so a process that trains several compiles a step once. A test trains a run of
its own where training is what it tests.
"""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from bam import files
from bam.audit.audited import with_step
from bam.data import datasets
from bam.privacy import checkpoint, ledger
from bam.training import loop, summary
from configs import digits
from tests.cases import made_once, random_images
from tests.run_folder import newest

SEED = 8675309
OWN_NAME, OWN_PATH = "ward_3_patients", "/hospital/ward3/files"


def own_data():
    """Images that cannot be loaded again once the run is over."""
    return random_images(OWN_NAME, 60, 37, mean=0.4321, std=0.1234)


def tiny(method="dp_sgd", **overrides):
    """Three steps of logistic regression on these images, with all that a release repeats."""
    config = digits.get_config(method)
    config.update({"accountant": "rdp", "num_steps": 3, "expected_batch_size": 20})
    config.update({"ema_decay": 0.9, "input_clip_norm": 2.5, "delta": 1.4e-5, "microbatch_size": 7})
    config.model.name, config.dataset.path = "linear", OWN_PATH
    config.eval.every = 0
    config.update_from_flattened_dict(overrides)
    return config


@functools.cache
def trainer():
    """That of all runs here whose config is as `tiny` has it."""
    return loop.build(tiny(), own_data())


@functools.cache
def _diagnosed():
    return loop.build(tiny(**{"eval.every": 1, "diagnostics.every": 1}), own_data())


def diverging(trainer, number=np.nan):
    """A trainer whose weights are `number` after every step."""
    fill = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, number), tree)  # noqa: E731

    def step(state, batch):
        state = trainer.step(state, batch)
        return state._replace(params=fill(state.params), averaged=fill(state.averaged))

    return with_step(trainer, step)


def _of_users():
    config = tiny(**{"dataset.group_size": 4, "dataset.groups": f"{OWN_PATH}/ids.npy"})
    config.expected_batch_size = 5
    return loop.build(config, own_data()._replace(users=np.arange(60) // 4))


def _banded():
    config = tiny(**{"mechanism.name": "banded"})
    config.update_from_flattened_dict({"mechanism.bands": 2})
    return loop.build(config, own_data())


RUNS = {
    "seeded": (trainer, SEED),
    "unseeded": (trainer, None),
    "diagnosed": (_diagnosed, SEED),
    "diverged": (lambda: diverging(_diagnosed()), SEED),
    "users": (_of_users, SEED),
    "banded": (_banded, None),
}


def copy(tmp_path_factory, name, folder):
    """Copies a run of `RUNS` to a new folder, and trains the run if it is the first copy."""
    make, seed = RUNS[name]
    train = lambda place: loop.train(make(), seed, place / "run")  # noqa: E731
    original = made_once(tmp_path_factory, f"run_{name}", train) / "run"
    return shutil.copytree(original, folder)


def last_state(workdir, trainer):
    """The state after the last step, as a run's folder keeps it: without its noise key."""
    return checkpoint.restore(newest(workdir), trainer.init(0))


def with_noise(state, noise):
    """The state with another state of its noise."""
    privatize = state.private.privatize._replace(noise=noise)
    return state._replace(private=state.private._replace(privatize=privatize))


def after(state, num_steps):
    """The state as if it had seen so many steps."""
    noise = state.private.privatize.noise
    return with_noise(state, noise._replace(step=jnp.asarray(num_steps, noise.step.dtype)))


def write_run(workdir, experiment, state):
    """The files of a finished run without a seed, whose last state is given."""
    plan, facts = experiment.record, {"test_accuracy": 0.5, "seconds": 1.0}
    facts |= {"step": int(state.step), "steps_begun": int(state.step)}
    workdir.mkdir()
    files.write_json(workdir / "config.json", json.loads(experiment.config.to_json_best_effort()))
    files.write_json(workdir / "plan.json", plan)
    processes = [ledger.this_process(1, 1)]
    written = summary.summarize(experiment, None, facts, processes=processes)
    files.write_json(workdir / "summary.json", written)
    (workdir / "checkpoints").mkdir()
    steps = {"step": int(state.step), "steps_begun": int(state.step)}
    facts = steps | {"record": plan, "digests": {}, "processes": processes, "more": {}}
    checkpoint.write(workdir / "checkpoints", facts, state)


def drawn(dtype="uint8"):
    """Coloured images of a size that every map of bam's takes."""
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (24, 28, 32, 3), np.uint8)
    images = images if dtype == "uint8" else (images / np.float32(255)).astype(dtype)
    split = datasets.Split(images, np.arange(24, dtype=np.int32) % 3)
    return datasets.Dataset("drawn", split, split, 3, *np.full((2, 3), 0.5, np.float32))


def drawn_floats():
    """The same images as floats."""
    return drawn("float32")


def run_on(folder, data="drawn", **features):
    """The folder of a run of one step on these images, with drawn weights."""
    config = tiny(num_steps=1, **{"dataset.name": f"tests.runs:{data}"})
    config.dataset.path = ""
    config.features.update({"cache": str(folder / "kept"), **features} if features else {})
    experiment = loop.build(config)
    state = after(experiment.init(0), 1)
    moved = jax.tree.map(
        lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape) / 10, state.averaged
    )
    write_run(folder / "run", experiment, state._replace(averaged=moved))
    return folder / "run"
