"""What a run's folder holds, for tests: its ledger, its checkpoints, its rows and its processes."""

import contextlib
import json
import resource
import struct

import numpy as np
from tensorboardX.proto import event_pb2

from bam.privacy import checkpoint


def begun(folder):
    """Steps in the ledger."""
    return (folder / "steps_begun").stat().st_size


def saved_steps(folder):
    """The steps of its checkpoints, the oldest first."""
    return sorted(int(x.stem) for x in (folder / "checkpoints").glob("*.npz"))


def newest(folder):
    """The file of its last checkpoint, which it has."""
    path = checkpoint.newest(folder / "checkpoints")
    assert path is not None
    return path


def header_of(folder):
    """What its last checkpoint says of it."""
    return checkpoint.read_header(newest(folder))


def rewrite_header(path, change):
    """Gives a checkpoint the header that `change` makes of those that it has."""
    with np.load(path) as file:
        first, *arrays = [file[f"arr_{i}"] for i in range(len(file.files))]
    header = change(json.loads(first.tobytes()))
    with path.open("wb") as file:
        np.savez(file, np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays)


def contents(folder):
    """The bytes of every file, by its place."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(folder):
    """The rows of its metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def processes_of(folder):
    """First step and commit of each process."""
    path = folder / "processes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(row["first_step"], row["commit"]) for row in map(json.loads, lines)]


def releases(folder):
    """What TensorBoard's files show of the weights after a step: every loss they had, by step."""
    shown = set()
    for path in (folder / "tensorboard").iterdir():
        data = path.read_bytes()
        while len(data) >= 12:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            if len(data) < length + 16:
                break  # killed while writing
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            losses = [v.simple_value for v in event.summary.value if v.tag == "test_loss"]
            shown |= {(event.step, loss) for loss in losses if event.step > 0}
            data = data[length + 16 :]
    return shown


@contextlib.contextmanager
def no_file_beyond(num_bytes):
    """What a full disk does, done to this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
