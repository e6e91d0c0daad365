"""The worked example of fine-tuning, on digits, and the benchmark of what is trained."""

import json

import numpy as np
import pytest

from bam.data import datasets
from examples.some_classes import some_classes
from tests.cases import run_command

CONFIG = """
from configs import digits

def get_config(method="dp_sgd"):
    config = digits.get_config(method)
    config.model.update({"name": "examples.own_model:mlp", "width": 4})
    config.update({"num_steps": 2, "accountant": "rdp"})
    with config.unlocked():
        config.dataset.update(
            {"name": "examples.some_classes:some_classes", "of": "digits", "classes": (7, 8, 9)}
        )
    config.eval.every = 1
    return config
"""


def test_some_classes_are_those_examples_in_their_order():
    whole, part = datasets.load("digits"), some_classes("digits", (8, 3))
    datasets.check(part)
    assert part.num_classes == 2 and part.name == "digits, classes 8, 3"
    for split, of in ((part.train, whole.train), (part.test, whole.test)):
        rows = np.isin(of.labels, (3, 8))
        np.testing.assert_array_equal(split.images, of.images[rows])
        np.testing.assert_array_equal(np.array([8, 3])[split.labels], of.labels[rows])
    for classes in ((1, 1), (3, 10), (-1, 2)):
        with pytest.raises(ValueError, match="of digits are not some of 0 to 9"):
            some_classes("digits", classes)


def test_the_example_trains_public_and_private_classes_and_writes_table_and_picture(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    command = (
        "scripts.finetune", f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/runs",
        f"--out={tmp_path}/out/result", "--head=Dense_1", "--public_steps=3", "--num_seeds=2",
    )  # fmt: skip
    done = run_command(*command, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("% in ") == 1 + 4 * 2  # runs
    found = json.loads((tmp_path / "out/result.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    sizes = {name: (row["num_params"], row["num_frozen"]) for name, row in rows.items()}
    head, rest = 4 * 3 + 3, 64 * 4 + 4
    assert sizes == {
        "all, from scratch": (head + rest, 0),
        "last layer": (head, rest),
        "normalisation, gains and last layer": (head, rest),  # the network has none of them
        "all": (head + rest, 0),
    }
    assert len({row["epsilon"] for row in rows.values()}) == 1
    begins = {name: row["config"]["init_fresh"] for name, row in rows.items()}
    assert begins.pop("all, from scratch") == "" and set(begins.values()) == {"Dense_1"}
    public = json.loads((tmp_path / "runs/public/seed0/summary.json").read_text())
    assert public["dataset"] == "digits, classes 0, 1, 2, 3, 4, 5, 6"
    assert public["epsilon"] is None and public["steps_taken"] == 3
    assert (tmp_path / "out/result.md").read_text().count("±") >= 4
    assert (tmp_path / "out/result.png").stat().st_size > 10_000

    again = run_command(*command)  # nothing is left to train
    assert again.returncode == 0 and "% in " not in again.stdout
    other = run_command(*command[:-2], "--public_steps=4")
    assert other.returncode == 2 and "num_steps = 3, not 4" in other.stderr
    own = run_command(*command, "--config.trainable=Dense_0")
    assert own.returncode == 2 and "sets trainable itself" in own.stderr


@pytest.mark.slow
def test_the_benchmark_writes_time_and_memory_of_every_set(tmp_path):
    done = run_command(
        "scripts.benchmarks.trainable", f"--out={tmp_path}/trainable", "--width=4", "--batch=2",
        "--trials=2", "--methods=dp_sgd", timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last, some, every = json.loads((tmp_path / "trainable.json").read_text())["rows"]
    assert last["num_params"] < some["num_params"] < every["num_params"]
    assert last["state_mb"] < some["state_mb"] < every["state_mb"]
    assert every["num_params"] == last["num_params"] + last["num_frozen"]
    assert all(row["ms"] > 0 and row["temporary_mb"] > 0 for row in (last, some, every))
    table = (tmp_path / "trainable.md").read_text().splitlines()
    assert table[2].startswith("| last layer | dp_sgd |") and len(table) == 5
