"""What a run's folder holds, for tests: its ledger, its checkpoints, its rows and its processes."""

import contextlib
import json
import resource
import struct

import numpy as np
from tensorboardX.proto import event_pb2

from bam import provenance
from bam.privacy import checkpoint
from bam.privacy.plan import make_plan
from bam.release import records
from bam.training import rundir
from configs import digits

SECRET_PATH = "/hospital/ward3/files"
MEASURED = {"fraction_clipped": 0.71234567, "gradient_norm": 1.6543217, "bias_norm": 0.9182736}


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


def made_by(folder, version):
    """Has all processes of its run have had that version of bam."""
    path = folder / "processes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["versions"]["bam"] = version
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    change = lambda header: header | {"processes": rows}  # noqa: E731
    rewrite_header(newest(folder), change)


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


def strict_json(text):
    """JSON that has no NaN and no infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def write_records(
    folder, *, private=True, seed=None, finished=True, diagnosed=True, begun=4, **summary
):
    """The records of a run of four steps, as `loop.train` leaves them."""
    config = digits.get_config("bam_sam" if private else "non_private")
    config.update({"accountant": "rdp", "num_steps": 4, "seed": seed, "delta": 1.4e-5})
    config.dataset.path, config.diagnostics.every = SECRET_PATH, int(diagnosed)
    plan = make_plan(
        num_examples=1437, expected_batch_size=256, num_steps=4, delta=1.4e-5,
        epsilon=2.34567 if private else float("inf"), accountant="rdp",
    )  # fmt: skip
    rows = []
    for step in range(begun + 1):
        spent = plan.epsilon_after(step) if private else None
        row = {"step": step, "steps_begun": step, "epsilon": spent, "seconds": 17.1234}
        row |= {"test_accuracy": 0.4321 + step / 1000} if step else {}
        if diagnosed:
            row |= {f"not_private/{name}": value + step for name, value in MEASURED.items()}
        rows.append(row)
    recorded = plan.to_json() | {"clip_norm": 1.0, "sensitivity": 1.0}
    facts = {"dataset": "digits", "seed": seed, "noise_key": "somewhere"}
    facts |= dict.fromkeys(records.RECORDED, "recorded") | recorded
    facts |= {"device": "cpu", "versions": provenance.versions(), "steps_begun": begun} | summary
    folder.mkdir()
    for name, found in (("config", rundir.as_json(config)), ("plan", recorded)):
        (folder / f"{name}.json").write_text(json.dumps(found))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "summary.json").write_text(json.dumps(facts))
    return folder
