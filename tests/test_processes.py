"""Two real processes on this machine, with `jax.distributed`: one run, whatever happens to one."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time

import numpy as np
import pytest

from bam.cli import jax_setup
from bam.privacy import checkpoint
from bam.training import loop
from configs import digits
from tests.cases import Command, assert_same_bits, distance
from tests.run_folder import begun, header_of, newest, rows_of

SETTINGS = {
    "model.name": "linear", "model.width": 1, "accountant": "rdp", "num_steps": 24,
    "expected_batch_size": 100, "eval.every": 1, "checkpoint.every": 4,
    "diagnostics.every": 12, "seed": 3,
}  # fmt: skip


def settings(**changes):
    return SETTINGS | {k.replace("__", "."): v for k, v in changes.items()}


def built(**changes):
    config = digits.get_config("dp_sat")
    config.update_from_flattened_dict(settings(**changes))
    return loop.build(config)


def by_hand(i):
    """Flags and environment of process i, as a user gives them."""
    if i == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            by_hand.port = free.getsockname()[1]
    flags = [f"--coordinator=localhost:{by_hand.port}", "--num_processes=2", f"--process_id={i}"]
    return flags, {}


def by_slurm(i):
    """Returns flags and environment of process i, as SLURM gives them.

    JAX makes a port of the job's id.
    """
    if i == 0:
        first = 2**16 - 2**12
        for job in range(os.getpid() % 2**11, 2**12):
            with socket.socket() as free, contextlib.suppress(OSError):
                free.bind(("localhost", first + job))
                by_slurm.job = job
                break
    job = {"JOB_ID": by_slurm.job, "NTASKS": 2, "PROCID": i, "LOCALID": i}
    env = {f"SLURM_{key}": str(value) for key, value in job.items()}
    return ["--coordinator=auto"], env | {"SLURM_STEP_NODELIST": "localhost"}


@contextlib.contextmanager
def two_processes(workdir, launcher=by_hand, **changes):
    """Yields both processes of a run, each with two devices.

    They do not outlive the block.
    """
    arguments = [
        "bam", "train", "--config=configs/digits.py:dp_sat", f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in settings(**changes).items() if value != ""),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(2):
            flags, environ = launcher(i)
            process = Command(*arguments, *flags, **environ, JAX_NUM_CPU_DEVICES="2")
            processes.append(stack.enter_context(process))
        yield processes


def wait_for_rows(workdir, processes, num_rows):
    metrics = workdir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < num_rows:
        for process in processes:
            process.check_runs()
        time.sleep(0.02)


def test_two_processes_make_the_run_of_one_and_survive_the_loss_of_one(tmp_path):
    whole = loop.train(built(), 3)
    workdir = tmp_path / "run"

    with two_processes(workdir) as processes:
        wait_for_rows(workdir, processes, 6)
        processes[1].send_signal(signal.SIGKILL)
        left = processes[0].wait(timeout=60)
    assert left.returncode != 0
    assert "a process of this run was lost" in left.stderr or "another task died" in left.stderr
    assert not (workdir / "summary.json").exists()
    assert len(rows_of(workdir)) < 25

    with two_processes(workdir) as processes:
        done = [process.wait() for process in processes]
    assert [process.returncode for process in done] == [0, 0], done
    assert done[0].stdout.count("test accuracy") >= 15  # since step 4 at the latest
    assert "4 × cpu in 2 processes" in done[0].stdout
    assert "step" not in done[1].stdout  # progress is shown once
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["num_devices"], summary["num_processes"]) == (4, 2)
    header, state = header_of(workdir), checkpoint.restore(newest(workdir), whole.state)
    assert header["step"] == 24
    assert header["record"] == built().record
    assert_same_bits(state.params, whole.state.params)
    rows = rows_of(workdir)
    assert [row["step"] for row in rows] == list(range(25))
    assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in whole.rows]
    np.testing.assert_allclose(
        rows[12]["not_private/bias_norm"], whole.rows[12]["not_private/bias_norm"], rtol=1e-3
    )
    # Control: what another seed does is far more.
    other = loop.train(built(), 4).state.params
    assert distance(other, whole.state.params) > 100 * distance(state.params, whole.state.params)


@pytest.mark.slow
def test_one_process_told_to_stop_stops_both_and_one_goes_on_alone(tmp_path):
    """Without a seed, what the operating system gave must be the same in both processes.

    That they find each other as under SLURM is tested on the way.
    """
    workdir = tmp_path / "run"
    with two_processes(workdir, by_slurm, seed="", checkpoint__every=0) as processes:
        wait_for_rows(workdir, processes, 3)
        processes[1].send_signal(signal.SIGTERM)  # not the one that writes
        done = [process.wait(timeout=60) for process in processes]
    assert [process.returncode for process in done] == [3, 3], done
    assert "the same command continues it" in done[0].stdout
    before = rows_of(workdir)
    assert 3 <= len(before) < 25
    assert begun(workdir) == before[-1]["step"]  # counted once, not twice
    result = loop.train(built(seed=None), None, workdir)
    assert result.rows[: len(before)] == before
    assert result.summary["num_processes"] == 1
    assert result.summary["test_accuracy"] > 0.5  # batches and noise made sense together
    assert result.summary["steps_taken"] == result.summary["steps_begun"] == 24


def test_lost_steps_and_the_recorded_plan_count_for_every_process(tmp_path):
    workdir, experiment = tmp_path / "run", built(seed=None)
    sigma = 1.01 * experiment.plan.noise_multiplier  # of another version of the accountant
    plan = dataclasses.replace(experiment.plan, noise_multiplier=sigma)
    of_another_version = loop.build(experiment.config, plan=plan)

    def crash(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(of_another_version, None, workdir, on_row=crash)
    with two_processes(workdir, seed="") as processes:
        done = [process.wait() for process in processes]
    assert [process.returncode for process in done] == [0, 0], done
    assert "3 steps were lost in a crash and their privacy is spent" in done[0].stdout
    assert "so this run ends after step 21 of 24" in done[0].stdout
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["steps_taken"], summary["steps_begun"]) == (21, 24)
    assert summary["noise_multiplier"] == sigma


def test_processes_that_cannot_be_are_refused():
    for given, message in (
        (("", 2), "need --coordinator=HOST:PORT"),
        (("localhost:1",), "needs --num_processes and --process_id"),
        (("nowhere", 2, 0), "needs --num_processes and --process_id"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_setup.join_processes(*given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--coordinator=localhost:9", "--num_processes=2", "--process_id=2"], "process_id"),
        (["--coordinator=auto"], "--coordinator=auto found no SLURM, Kubernetes, Cloud TPU or MPI"),
    ],
)
def test_processes_that_do_not_find_each_other_are_one_line(tmp_path, arguments, message):
    command = ("bam", "train", "--config=configs/digits.py", f"--workdir={tmp_path}/run")
    with Command(*command, *arguments) as process:  # before JAX has started
        done = process.wait()
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
