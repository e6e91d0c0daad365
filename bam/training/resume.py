"""Where an unfinished run goes on.

What its folder holds is read back, and checked, in this order: the config (`check_resumable` and
`with_recorded` in `rundir.py`), the plan (`recorded_plan` there), then the newest checkpoint and
the ledger, here. `loop.train` begins at the step after that, where `RunFiles.start_after` drops
later rows of the metrics.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bam.data import datasets
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy.ledger import PROCESSES, Ledger, lost_in_words
from bam.privacy.plan import check_same
from bam.training.checkpoint import Checkpoints
from bam.training.rundir import RunFiles
from bam.training.step import TrainState
from bam.training.trainer import Trainer


class Start(NamedTuple):
    """Where a run stands before its next step.

    Attributes:
      done: steps done before; -1: it begins.
      end: the step that it ends after.
      state: that of the checkpoint, or the first.
      facts: what a checkpoint records beside the state: the `seconds` taken and the `identity`,
        which it must agree with to be of this run.
      ledger: the steps begun.
    """

    done: int
    end: int
    state: TrainState
    facts: JsonObject
    ledger: Ledger


def resume(
    trainer: Trainer,
    files: RunFiles,
    checkpoints: Checkpoints,
    first_state: TrainState,
    log: Callable[[str], None],
) -> Start:
    """Stands after the newest checkpoint; without one, before the first step of `first_state`.

    `log` is called with a line if steps were lost and count. Raises InputError for a checkpoint of
    another run, plan, data set or step, for a ledger or a list of processes that is not whole, and
    for a folder of an earlier version, which has no such list.
    """
    plan = trainer.plan
    data = files.checkpoints and datasets.fingerprint(files.data_key(), trainer.dataset.train)
    identity = {"plan": trainer.record, "data": data, "init": trainer.weights.digest}
    done, state, seconds, steps_begun, same_data = -1, first_state, 0.0, 0, True
    processes: list[JsonObject] = []
    if restored := checkpoints.restore(first_state):
        done, state, facts = restored
        _check_restored(files.checkpoints, done, state, facts["identity"], trainer)
        same_data = facts["identity"]["data"] == data
        seconds, steps_begun = facts["seconds"], facts["steps_begun"]
        processes = facts.get("processes", [])
    taken = max(0, done)
    num_devices = trainer.mesh.size if trainer.mesh else 1
    ledger = files.open_ledger(taken, steps_begun, processes, num_devices)
    ledger.end_period(plan.mechanism.period)
    end = ledger.last_step(taken)
    if taken < end and not same_data:
        raise InputError(
            f"{files.checkpoints} is of a run on other training data, or the run's data_key is "
            "gone; choose another --workdir"
        )
    if ledger.begun and not files.processes:
        raise InputError(
            f"what took steps 1 to {ledger.begun} is not known: the run has no {PROCESSES}, as of "
            "an earlier version; choose another --workdir"
        )
    if ledger.begun > taken:
        log(lost_in_words(plan, ledger.begun - taken, end))
    return Start(done, end, state, {"seconds": seconds, "identity": identity}, ledger)


def _check_restored(
    where: Path | None, done: int, state: TrainState, identity: JsonObject, trainer: Trainer
) -> None:
    """Refuses a checkpoint that is not of this run, or not of the step that it is named after."""
    assert where is not None
    check_same(where, identity["plan"], trainer.record)
    if int(state.step) != done:
        raise InputError(f"{where}/{done} is renamed: it is of step {state.step}")
    if identity["init"] != trainer.weights.digest:
        raise InputError(
            f"{where} is of a run that began from other weights than those in "
            f"{trainer.config.init_from} now; choose another --workdir"
        )
