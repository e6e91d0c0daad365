"""A private run: its random streams, its count of steps, and its checkpoints.

`bam.PrivateTraining` is a run with a transform, and `bam train` is a loop over one.

    run = PrivateRun(plan, seed)
    run.open(folder, record)             # begins in the folder, or continues after its checkpoint
    state = run.restore(first_state)     # the saved state, or first_state
    for step in run.steps():             # each step is counted on the disk before it is yielded
        state = take(state, run.batch(step))
        run.save(state)                  # when due

A folder holds `plan.json` (the record, which must be the same when a run continues), the ledger
`steps_begun` (without a seed), `processes.jsonl`, `checkpoints/STEP.npz`, `data_key` and `lock`.
"""

import contextlib
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree, UInt32

from bam import files
from bam.core import forks, scalars, seeds
from bam.core.noise import CorrelatedNoiseState, GaussianNoiseState, with_new_key
from bam.core.sampling import PaddedBatch
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import checkpoint, ledger, processes
from bam.privacy.plan import PrivacyPlan
from bam.privacy.recorded_plan import PLAN, check_same, check_version

CHECKPOINTS = "checkpoints"
# The folder's secret key -> digests of the data and settings of a run, by names for messages.
Digests = Callable[[bytes], JsonObject]


class PrivateRun:
    """The steps of a plan, each begun once, with their random streams, ledger and checkpoints.

    A run belongs to one process, or to one program in several processes (`jax.distributed`), of
    which the first writes files. A fork of the process cannot use it. Threads may share it.

    Attributes:
      seed: as given.
      step: the last drawn step; 0 before the first. After `open`, the step of the checkpoint.
      lost: number of counted steps that no checkpoint has: those that earlier processes began and
        did not save, and missing steps of a period.
      more: a JSON object that the caller keeps in checkpoints beside the state.
      resumed_after: the step of the checkpoint that the run continues; 0 for a new run.
      num_devices: number of devices that share the examples of a step.
      folder: of the run; None until `open`.
      processes: the processes that took steps, as `ledger.this_process` describes them.
      lock: the lock of threads that share the run.
      is_resumed: whether `open` found a checkpoint.

    Args:
      plan: the privacy plan.
      seed: of batches and noise; the same seed repeats them. None, for a run to release, takes 256
        bits of the operating system, new in every process and never saved. Steps that a crash lost
        are then repeated with new batches and noise, so they count, see `ledger.py`.
      num_devices: number of devices that share the examples of a step, for the record of processes.
    """

    def __init__(self, plan: PrivacyPlan, seed: int | None = None, num_devices: int = 1) -> None:
        """Makes the run, and draws and writes nothing yet."""
        self._plan = plan
        self.seed = None if seed is None else scalars.whole("seed", seed)
        self.step, self.lost = 0, 0
        self.more: JsonObject = {}
        self.folder: Path | None = None
        self.is_resumed = False
        self.num_devices, self.resumed_after = num_devices, 0
        self._is_unseeded = seed is None
        self._root_seed = processes.random_seed() if self.seed is None else self.seed
        # Steps drawn from other streams: `resumed_after` without a seed, otherwise none.
        self._before = 0
        self.processes = joined = list[JsonObject]()
        join = lambda step: joined.append(ledger.this_process(step, num_devices))  # noqa: E731
        self._ledger = ledger.Ledger(None, plan, 0, 0, join)
        self._record: JsonObject = {}
        self._digests: JsonObject = {}
        self._process, self.lock, self._closed = forks.this_process(), threading.RLock(), False
        self._release: Callable[[], object] = lambda: None

    @property
    def plan(self) -> PrivacyPlan:
        """N, l, q, T, σ, ε and δ, fixed from the start."""
        return self._plan

    # Drawing.

    def key(self, label: str) -> UInt32[np.ndarray, " words"]:
        """Returns the key with one of the labels `seeds.KEY_LABELS`."""
        return seeds.host_key(self._root_seed, label)

    def steps(self) -> Iterator[int]:
        """Yields the remaining steps, numbered from 1 in a run.

        Each step is counted on the disk first. A plan that is used up has none. Raises InputError
        after `close`, RuntimeError in a fork, BlockingIOError if another process counts here, and
        OSError if a step cannot be counted.
        """
        # `end` falls when a step is lost, so it is read anew for each step.
        while self.step < self.end:
            with self.in_use():
                if self.step >= self.end:  # another thread has begun the last step
                    return
                # The count is on the disk before the step's noise exists and its batch is given
                # out. A reader of files may have read the rows earlier.
                self._ledger.begin()
                self.step += 1
                step = self.step
            yield step

    def batch(self, step: int) -> PaddedBatch:
        """Returns the rows of a step's batch.

        They are as secret as the seed, and the same in each call.
        """
        # A resumed run without a seed has a new stream, whose steps are numbered from 1.
        return self.plan.batch(self._root_seed, step - self._before)

    @property
    def end(self) -> int:
        """The last step of the run: `plan.training_steps`, or less if too many steps were lost."""
        return self._ledger.last_step(self.step)

    @property
    def steps_begun(self) -> int:
        """Number of steps counted, lost ones and missing steps of a period included."""
        return self._ledger.begun

    @property
    def epsilon_spent(self) -> float:
        """ε of the steps begun, at the plan's δ, or `inf` without privacy."""
        return self.plan.epsilon_after(self.steps_begun)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Lets one thread in at a time.

        RuntimeError in a fork of the process, and InputError after `close`.
        """
        forks.check_not_forked(self._process, "this private run")
        with self.lock:
            if self._closed:
                raise InputError(
                    "this private run is closed, and another may have continued it in its folder: "
                    "make a new PrivateTraining"
                )
            yield

    # Continuing in a folder.

    def open(
        self,
        folder: Path,
        record: JsonObject,
        digests: Digests | None = None,
        *,
        at_least: int = 0,
        must_begin: bool = False,
    ) -> None:
        """Begins a run in a folder, which is made, or continues after its newest checkpoint.

        Args:
          folder: of the run; if it is made, only its owner can read it.
          record: JSON values that must be the same when the run continues: the plan's `to_json`,
            and the other settings that define the run.
          digests: digests of data and settings that must be the same, too, but must not be readable
            in the folder.
          at_least: number of begun steps according to another record of the run.
          must_begin: whether a folder where a run was begun is refused.

        Raises:
          InputError: for a folder of another run, or a damaged one. The plan, ledger and
            checkpoints of a run there are then unchanged.
          BlockingIOError: if another process uses the folder.
          OSError: if it cannot be written.
        """
        with contextlib.ExitStack() as opened:
            self._check_new(folder, must_begin)
            if processes.writes():
                files.make_folder(folder, mode=0o700)
                opened.enter_context(files.lock(folder))
            # Again under the lock, because another process may have begun meanwhile.
            begins = self._check_new(folder, must_begin)
            counts = folder / "steps_begun" if self._is_unseeded and self.plan.private else None
            saved = None if begins else self._read_header(folder, record)
            header = saved or {"step": 0, "steps_begun": 0, "processes": [], "digests": {}}
            if begins:
                ledger.check_no_processes(folder)
                if counts and processes.writes():
                    ledger.create(counts)  # before plan.json: a run without its ledger is refused
            joined = ledger.read_processes(folder, header["processes"])
            num_devices = self.num_devices

            # It holds no reference to `self`. Otherwise the run would keep itself alive, and its
            # finalizer would never free the folder.
            def join(first_step: int) -> None:
                process = ledger.this_process(first_step, num_devices)
                ledger.add_process(folder, process)
                joined.append(process)

            at_least = max(at_least, header["steps_begun"])
            counted = ledger.Ledger(counts, self.plan, header["step"], at_least, join)
            opened.callback(counted.close)
            if counted.begun and not begins and not joined:
                raise InputError(
                    f"{folder} has no {ledger.PROCESSES} for steps 1 to {counted.begun} (from an "
                    "earlier version?): choose another folder"
                )
            has_steps_left = header["step"] < counted.last_step(header["step"])
            self._digests = self._check_digests(folder, header, has_steps_left, digests)
            # A run that has taken its last step draws nothing anew.
            if has_steps_left and not begins:
                counted.end_period(self.plan.mechanism.period)
            for _ in range(self.step):  # steps that were taken before the run had a folder
                counted.begin()
            if begins and processes.writes():  # last, because with plan.json the run can continue
                files.write_json(folder / PLAN, record)
            if saved:
                self.is_resumed, self.more = True, saved["more"]
            if not begins:
                self.step = self.resumed_after = header["step"]
                self._before = self.step if self._is_unseeded else 0
                self.lost = counted.begun - self.step
            self._record, self.folder, self._ledger = record, folder, counted
            self.processes = joined
            self._release = weakref.finalize(self, opened.pop_all().close)

    def _check_new(self, folder: Path, must_begin: bool) -> bool:
        """Returns whether a new run begins in a folder.

        InputError if it must and does not.
        """
        begins = not (folder / PLAN).exists()
        if must_begin and not begins:
            raise InputError(f"{folder} holds a training: save this one in another folder")
        if begins and (folder / CHECKPOINTS).exists():
            raise InputError(f"{folder} has {CHECKPOINTS} but no {PLAN}; choose another folder")
        return begins

    def _read_header(self, folder: Path, record: JsonObject) -> JsonObject | None:
        """Returns the header of the newest checkpoint, or None if there is no checkpoint.

        InputError if the checkpoint or the folder is another run's.
        """
        check_version(folder)
        check_same(folder / PLAN, files.read_json(folder / PLAN), record)
        path = checkpoint.newest(folder / CHECKPOINTS)
        if path is None:
            return None
        header = checkpoint.read_header(path)
        check_same(path, header["record"], record)
        # A renamed checkpoint could hide newer ones, and steps would be repeated.
        if path.stem != str(header["step"]):
            raise InputError(
                f"{path} was renamed: it is the checkpoint of step {header['step']}; rename it back"
            )
        return header

    def _check_digests(
        self, folder: Path, header: JsonObject, has_steps_left: bool, digests: Digests | None
    ) -> JsonObject:
        """Returns the digests of the run's data and settings.

        InputError if they changed and steps are left.
        """
        ours = digests(self._data_key(folder)) if digests else {}
        theirs = header["digests"]
        for name in theirs | ours if theirs else {}:
            if has_steps_left and ours.get(name) != theirs.get(name):
                raise InputError(
                    f"{folder} belongs to a run with other {name}, or lacks its data_key: choose "
                    "another folder"
                )
        return ours

    def _data_key(self, folder: Path) -> bytes:
        """Returns 32 secret bytes of the folder, the same in every process.

        `finish` removes them. Without them, the digests confirm no guess at the data.
        """
        key = bytes(32)
        if processes.writes():
            path = folder / "data_key"
            if not path.exists():
                files.write_text(path, secrets.token_hex(32), mode=0o600)
            text = files.read_bytes(path).decode(errors="replace")
            if not re.fullmatch("[0-9a-f]{64}", text):
                raise InputError(f"{path} is damaged: choose another folder")
            # Only the first process reads the file, so all processes get the same bytes.
            key = bytes.fromhex(text)
        return processes.from_first(np.frombuffer(key, np.uint32)).tobytes()

    def check_room(self, tree: PyTree) -> None:
        """Raises OSError if the folder has no room for a checkpoint of a pytree."""
        if self.folder and processes.writes():
            files.make_folder(self.folder / CHECKPOINTS, mode=0o700)
            checkpoint.check_room(self.folder / CHECKPOINTS, tree)

    def check_savable(self, tree: PyTree) -> None:
        """Raises InputError for a leaf of a pytree that `save` would refuse."""
        checkpoint.check(self._without_secrets(tree), self._noise_key())

    def save(self, tree: PyTree) -> None:
        """Saves a pytree, all or nothing, without secret keys.

        The saved step is that of the noise state in the tree, which may be older than the last
        drawn step. Raises InputError for a leaf that is not an array of numbers, or is a noise key;
        OSError if the checkpoint cannot be written.
        """
        if self.folder is None or not processes.writes():
            return
        tree = self._without_secrets(tree)
        checkpoint.check(tree, self._noise_key())
        # The tree may be older than the last drawn step, for example if that step failed.
        steps = [int(x.step) for x in jax.tree.leaves(tree, is_leaf=_is_noise) if _is_noise(x)]
        header: JsonObject = {
            "record": self._record,
            "digests": self._digests,
            "processes": self.processes,
            "step": steps[-1] if steps else self.step,
            "steps_begun": self.steps_begun,
            "more": self.more,
        }
        files.make_folder(self.folder / CHECKPOINTS, mode=0o700)
        checkpoint.write(self.folder / CHECKPOINTS, header, tree)

    def restore(self, like: PyTree) -> PyTree:
        """Returns the last saved pytree, with the structure of `like`.

        If nothing was saved, it returns `like` itself. Without a seed, its noise state gets this
        process's key, and takes back no earlier noise. InputError if other arrays were saved.
        """
        saved = self.folder and checkpoint.newest(self.folder / CHECKPOINTS)
        tree = checkpoint.restore(saved, like) if saved else like
        if not self._is_unseeded:
            return tree
        return _map_noise(
            lambda x: with_new_key(x, processes.put(self.key("noise").copy(), x.key.sharding)), tree
        )

    def _noise_key(self) -> bytes:
        return self.key("noise").tobytes() if self._is_unseeded else b""

    def _without_secrets(self, tree: PyTree) -> PyTree:
        """Returns the pytree without noise keys and past noise.

        It is unchanged if a seed repeats them.
        """
        if not self._is_unseeded:
            return tree
        # With a key of zeros a sum would be NaN, so a checkpoint alone cannot continue.
        blank = np.zeros(8, np.uint32)
        return _map_noise(lambda x: with_new_key(x, processes.put(blank, x.key.sharding)), tree)

    def finish(self) -> None:
        """Removes `data_key`, so that nothing in the folder confirms a guess at the data."""
        if self.folder and processes.writes():
            (self.folder / "data_key").unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the run, which takes no more steps, and frees the folder."""
        with self.lock:
            self._closed = True
            self._release()


def _is_noise(node: object) -> bool:
    return isinstance(node, GaussianNoiseState | CorrelatedNoiseState)


def _map_noise(change: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Returns the pytree with each noise state changed."""
    return jax.tree.map(lambda x: change(x) if _is_noise(x) else x, tree, is_leaf=_is_noise)
