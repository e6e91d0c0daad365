"""What does not fit the memory is refused before it runs, and the advice then fits."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam import memory
from bam.audit import canary
from bam.cli import main, train
from bam.core import sampling
from bam.data import common, datasets
from bam.errors import InputError
from bam.features import extraction
from bam.training import loop, public_clip, tuning
from bam.training import step as steps
from tests.cases import compilations, tiny_digits

MIB = 2**20


def written(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# What is free.

HOST = {"proc/meminfo": "MemTotal: 8192 kB\nMemAvailable:    4096 kB\n"}


def group(version, folder, limit, used, files="inactive_file 0\n"):
    """The files of a control group with a limit."""
    top, names, prefix = {
        1: ("sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
        2: ("sys/fs/cgroup", ("memory.max", "memory.current"), ""),
    }[version]
    statistics = "".join(f"{prefix}{line}\n" for line in files.splitlines())
    texts = (*map(str, (limit, used)), statistics)
    return {
        f"{top}{folder}/{name}": text
        for name, text in zip((*names, "memory.stat"), texts, strict=True)
    }


def odd(*of_group):
    """The files of a group of version 2 without its statistics."""
    return {k: x for k, x in group(2, *of_group).items() if not k.endswith("memory.stat")}


def inside(*lines):
    return {"proc/self/cgroup": "\n".join(["1:cpu:/", *lines]) + "\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 4 * MIB),
        (inside("0::/a/b") | group(2, "/a/b", 3 * MIB, MIB), 2 * MIB),
        (inside("0::/a/b") | group(2, "/a", 3 * MIB, MIB), 2 * MIB),  # the limit of a group above
        (inside("0::/host/name") | group(2, "", 3 * MIB, MIB), 2 * MIB),  # seen from a container
        (inside("0::/a") | group(2, "/a", "max", MIB), 4 * MIB),
        (inside("0::/a") | group(2, "/a", 9 * MIB, MIB), 4 * MIB),  # more than the machine has
        (inside("0::/a") | group(2, "/a", MIB, 2 * MIB), 0),
        # Pages of files make room.
        (
            inside("0::/a")
            | group(2, "/a", 3 * MIB, 2 * MIB, f"active_file {MIB // 2}\ninactive_file {MIB}\n"),
            2.5 * MIB,
        ),
        (inside("4:memory:/a", "0::/") | group(1, "/a", 3 * MIB, MIB), 2 * MIB),
        (inside("4:cpu,memory:/docker/x") | group(1, "", 3 * MIB, MIB), 2 * MIB),
        (
            inside("4:memory:/a") | group(1, "/a", 3 * MIB, 3 * MIB, f"inactive_file {MIB}\n"),
            MIB,
        ),
        (inside("4:memory:/") | group(1, "", 9223372036854771712, MIB), 4 * MIB),
        (inside("3:cpuset:/a") | group(1, "/a", MIB, 0), 4 * MIB),  # another group's
        # Odd files: without statistics, with odd ones, an empty line, and -1 for no limit.
        (inside("0::/a") | odd("/a", 3 * MIB, MIB), 2 * MIB),
        (inside("0::/a") | group(2, "/a", 3 * MIB, 2 * MIB, f"x y z\nactive_file {MIB}"), 2 * MIB),
        (inside("", "0::/a") | group(2, "/a", 3 * MIB, MIB), 2 * MIB),
        (inside("4:memory:/a") | group(1, "/a", -1, MIB), 4 * MIB),
        (inside("0::/a") | group(2, "/a", 3 * MIB, MIB, f"active_file {9 * MIB}"), 3 * MIB),
    ],
)
def test_free_memory_is_what_the_machine_and_its_containers_leave(tmp_path, files, free):
    assert memory.free(written(tmp_path, HOST | files)) == free


def test_without_linux_the_machines_memory_is_free(tmp_path):
    assert memory.free(tmp_path) == memory.machine() > 2**30


# What a program needs.


def test_a_program_needs_its_temporaries_and_results_and_no_argument_that_is_there():
    x = np.ones((512, 512), np.float32)
    program = jax.jit(lambda x: x @ x + jnp.sin(x) @ x)
    for argument, more in ((jnp.asarray(x), 0), (x, MIB)):
        needed = memory.needs(program, argument)
        assert needed.num_sharing == 1 and 0 < needed.free <= memory.free() + 2**30
        # The sine and a product, beside the result.
        assert MIB <= needed.num_bytes - more <= 4 * MIB
    in_place = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert memory.needs(in_place, jnp.asarray(x)).num_bytes < MIB
    assert memory.needs(jax.jit(lambda x: x + 1), jnp.asarray(x)).num_bytes >= MIB


def test_a_program_that_was_asked_is_not_compiled_again():
    program, x = jax.jit(lambda x: jnp.cos(x) @ x), jnp.ones((33, 33))
    assert compilations(lambda: memory.needs(program, x)) == 1
    assert compilations(lambda: (program(x), memory.needs(program, x))) == 0


class Device:
    """A stand-in for a device of an accelerator."""

    platform = "gpu"

    def __init__(self, limit, in_use):
        self.statistics = limit and {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self):
        return self.statistics


def test_an_accelerator_tells_its_own_memory_and_the_fullest_one_decides():
    assert memory._free_on([Device(10, 3), Device(10, 4)]) == (6, 1)
    assert memory._free_on([Device(10, 3), Device(None, 0)]) is None
    free, sharing = memory._free_on(jax.devices()[:2])
    assert sharing == 2 and free == pytest.approx(memory.free() / 2, rel=0.2)


@pytest.mark.parametrize("told", [None, NotImplementedError("no analysis")])
def test_what_nobody_tells_is_not_refused(monkeypatch, told):
    def memory_analysis(self):
        if told:
            raise told

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", memory_analysis)
    monkeypatch.setattr(memory, "free", lambda: 1)
    assert memory.needs(jax.jit(lambda x: x + 1), jnp.ones(3)) is None
    loop.train(loop.build(tiny_digits(num_steps=1)), 0)


@pytest.mark.parametrize("most", [5, 20, 25, 300, 1000, 1999])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_the_largest_size_that_fits_takes_few_compilations(most, step):
    asked = []

    def num_bytes(size):
        asked.append(size)
        return 10 + 10 * step * -(-size // step)  # in steps, as if rows were padded

    size, least = memory.largest_size(num_bytes, 200, num_bytes(200), most)
    assert least == num_bytes(1)
    assert (size == 0) == (least > most)
    assert len(asked) <= 6
    if size:
        assert num_bytes(size) <= most
        assert num_bytes(size + 2 * step) > most or size + 2 * step > 200


# What is refused.


def with_memory(monkeypatch, free, size=256, log=lambda line: None, **changes):
    """A run with so much free memory and such a microbatch size."""
    monkeypatch.setattr(memory, "free", lambda: free)
    config = tiny_digits(microbatch_size=size, num_steps=1, **changes)
    return loop.build(config, hardware=jax.devices()[:1], log=log)


@functools.cache
def step_bytes(size, method="dp_sgd"):
    """What a step takes."""
    config = tiny_digits(method, microbatch_size=size, num_steps=1)
    built = loop.build(config, hardware=jax.devices()[:1])
    state, nothing = built.init(0), sampling.pad(np.arange(0), built.plan.capacity, 0, 0)
    return memory.needs(built.step.__wrapped__, state, built.batch(state, nothing)).num_bytes


def advised(message):
    return int(re.search(r"--config\.microbatch_size=(\d+) fits$", message)[1])


def test_a_step_that_does_not_fit_is_refused_before_it_counts_and_the_advice_fits(
    monkeypatch, tmp_path
):
    free, said = (step_bytes(8) + step_bytes(256)) // 2, []
    built = with_memory(monkeypatch, free, log=said.append)
    with pytest.raises(InputError, match=r"^a step with microbatch_size=256 takes") as refused:
        loop.train(built, None, tmp_path)
    assert said[-1].endswith("are free: looking for a size that fits …")
    size = advised(str(refused.value))
    assert 32 < size < 256 and step_bytes(size) <= 0.9 * free
    # In the same folder: of the refused run there is no config, and no step was counted.
    result = loop.train(with_memory(monkeypatch, free, size), None, tmp_path)
    assert result.rows[-1]["steps_begun"] == 1
    # The control: what fits is not refused.
    loop.train(with_memory(monkeypatch, step_bytes(256) + 2**20), 0)


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_dry_run_goes_on_with_the_size_that_fits_which_is_compiled_already(monkeypatch):
    free, lines = (step_bytes(8) + step_bytes(256)) // 2, []
    built = with_memory(monkeypatch, free)
    state, rows = built.init(0), built.place_rows()
    with pytest.raises(memory.TooLargeError) as refused:
        built.check_step(state, rows)
    size = advised(str(refused.value))
    smaller = built.with_microbatch_size(size)
    assert compilations(smaller.check_step, state, rows) == 0
    fitting = train.fit_memory(built, rows, lines.append)
    assert fitting.config.microbatch_size == size and step_bytes(size) <= 0.9 * free
    assert lines == [str(refused.value)]


def test_diagnostics_that_do_not_fit_are_refused_before_a_step_counts_and_before_the_config(
    monkeypatch, tmp_path
):
    diagnosed = {"diagnostics__every": 1, "diagnostics__num_examples": 200}
    built = with_memory(monkeypatch, step_bytes(256) + 2**12, **diagnosed)
    with pytest.raises(InputError, match=r"^measuring the clipping bias with microbatch_size=256"):
        loop.train(built, None, tmp_path)
    assert not (tmp_path / "config.json").exists()
    monkeypatch.setattr(memory, "free", lambda: 2**40)  # the control
    assert loop.train(built, None, tmp_path).rows[-1]["steps_begun"] == 1


def test_a_run_that_goes_on_is_told_to_free_memory_and_not_another_size(monkeypatch, tmp_path):
    config = tiny_digits(num_steps=2, checkpoint__every=1)
    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(config), None, tmp_path, should_stop=lambda: True)
    begun = (tmp_path / "steps_begun").read_bytes()
    monkeypatch.setattr(memory, "free", lambda: 2**10)
    with pytest.raises(InputError, match="free some, because a run that goes on keeps its micro"):
        loop.train(loop.build(config), None, tmp_path)
    assert (tmp_path / "steps_begun").read_bytes() == begun
    monkeypatch.setattr(memory, "free", lambda: 2**40)
    loop.train(loop.build(config), None, tmp_path)


def test_one_example_at_a_time_is_advised_where_it_just_fits(monkeypatch):
    built = with_memory(monkeypatch, int(step_bytes(1) / 0.95), size=64)
    with pytest.raises(InputError, match=r"--config\.microbatch_size=1 fits$"):
        loop.train(built, 0)


def test_a_single_example_that_does_not_fit_is_refused_with_another_remedy(monkeypatch):
    with pytest.raises(InputError, match=r"a single example takes .* take a smaller model, as"):
        loop.train(with_memory(monkeypatch, 1000), 0)


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_asking_for_memory_compiles_nothing_more(monkeypatch):
    def programs(needs):
        monkeypatch.setattr(memory, "needs", needs)  # which forgets what was compiled
        built = loop.build(tiny_digits(num_steps=1))
        return compilations(lambda: loop.train(built, 0))

    needs = memory.needs
    programs(needs)  # also those that all runs share
    assert programs(needs) == programs(lambda *args: None) > 0


def test_a_step_that_does_not_fit_is_one_line_and_a_dry_run_goes_on(monkeypatch, tmp_path, capsys):
    flags = ["--config=digits:dp_sgd", "--config.model.name=linear", "--config.accountant=rdp"]
    flags += ["--config.num_steps=3", "--config.microbatch_size=256"]
    monkeypatch.setattr(memory, "free", lambda: (step_bytes(8) + step_bytes(256)) // 2)
    monkeypatch.setattr(memory, "machine", lambda: 2**40)
    assert main.main(["train", *flags, f"--workdir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a step with microbatch_size=256 takes")
    assert main.main(["train", *flags, "--config.dry_run"]) == 0
    output = capsys.readouterr()
    assert line.removeprefix("error: ") in output.out.splitlines() and output.err == ""
    assert f"of training on this device, {advised(line)} at a time" in output.out


def test_a_size_that_does_not_fit_is_not_timed_and_named(monkeypatch):
    said = []
    built = with_memory(monkeypatch, 2**40, 8, said.append)
    monkeypatch.setattr(tuning, "WORTH_IT", math.inf)
    assert tuning.fastest_size(built) == 8 and said == []
    least, whole = [], memory.needs
    monkeypatch.setattr(memory, "needs", lambda *x: least.append(whole(*x)) or least[-1])
    tuning.fastest_size(built)
    monkeypatch.setattr(memory, "free", lambda: sum(x.num_bytes for x in least) // 2)
    assert tuning.fastest_size(built) == 1
    assert said == [f"microbatch_size=8 {least[-1]}: left out"]
    monkeypatch.setattr(memory, "free", lambda: 10)
    with pytest.raises(InputError, match="the gradient of one example does not fit"):
        tuning.fastest_size(built)


def test_as_many_images_are_evaluated_at_once_as_fit(monkeypatch):
    built = with_memory(monkeypatch, 2**40, 8)
    params = loop.whole_model(built.init(0))
    whole = loop.evaluate(built, params)
    assert built.programs.fitting == {steps.score_images: 1000}
    short = with_memory(monkeypatch, 60_000, 8)
    few = loop.evaluate(short, params)
    assert 1 <= short.programs.fitting[steps.score_images] <= 125
    assert few["test_accuracy"] == whole["test_accuracy"]
    assert few["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-5)


def test_diagnostics_features_and_a_clip_norm_that_do_not_fit_are_refused(monkeypatch):
    built, digits = with_memory(monkeypatch, 2**40, 8), datasets.load("digits")
    state, rows = built.init(0), built.rows(np.arange(8))
    identity = lambda images: images + 1  # noqa: E731
    calls = {
        "measuring the clipping bias with microbatch_size=8 takes": lambda: dataclasses.replace(
            built
        ).diagnose(state, rows),
        "mapping 256 images to features takes": lambda: extraction.extract(digits, identity, {}),
        "a step of 128 images takes": lambda: clip_norm(digits, 1),
        "measuring norms takes": lambda: clip_norm(digits, 0),
    }

    def clip_norm(public, num_steps):
        model = {"name": "linear", "width": 1}
        return public_clip.clip_norm_from_public(public, (8, 8, 1), model, 0.5, num_steps)

    for message, call in calls.items():
        call()  # the control
        monkeypatch.setattr(memory, "free", lambda: 1000)
        with pytest.raises(InputError, match=f"^{message} .* of memory, and .* are free"):
            call()
        monkeypatch.setattr(memory, "free", lambda: 2**40)


@pytest.mark.parametrize("group_size", [0, 2])
def test_an_audit_that_does_not_fit_is_refused(monkeypatch, group_size):
    config = tiny_digits(num_steps=1, microbatch_size=4, expected_batch_size=4)
    config.dataset.group_size = group_size
    monkeypatch.setattr(memory, "free", lambda: 1000)
    with pytest.raises(InputError, match=r"^a step with microbatch_size=4 takes"):
        canary.scores(config, 8, 2)


def test_data_that_do_not_fit_what_is_free_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "free", lambda: 3 * MIB)
    common.check_memory(3 * MIB, "a file")
    with pytest.raises(common.DataError, match=r"a file: 4\.0 MiB are needed in .* 3\.0 MiB are"):
        common.check_memory(4 * MIB, "a file")
