"""Compiling for devices that are not there, and what the compiler says."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bam import files
from bam.data import datasets
from configs import digits
from scripts.benchmarks import ahead
from scripts.benchmarks.ahead import collectives, convolutions, num_bytes
from tests.cases import run_command

ROOT = Path(__file__).parents[1]

# The first exchanges 80 and 4 bytes; the second, which starts and is done, 32 bytes twice.
TEXT = """ENTRY %main (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0:T(256)S(1)} parameter(0)
  %all-reduce.1 = (s32[10,2]{1,0}, s32[]) all-reduce(%p0, %p0), to_apply=%none
  %all-gather.1 = ((f32[4]{0}, f32[4]{0}), (f32[4]{0}, f32[4]{0})) all-gather-start(%p0, %p0)
  %all-gather.2 = ((f32[4]{0}, f32[4]{0}), (f32[4]{0}, f32[4]{0})) all-gather-start(%p0, %p0)
  %done.1 = (f32[4]{0}, f32[4]{0}) all-gather-done(%all-gather.1)
  ROOT %sum = f32[8]{0} add(%p0, %all-reduce.1)
}
"""


def test_what_devices_exchange_is_counted_by_kind_and_bytes():
    assert collectives(TEXT) == [
        {"kind": "all-reduce", "count": 1, "bytes": 84},
        {"kind": "all-gather", "count": 2, "bytes": 32},
    ]


# As cuDNN's calls stand in a program for a GPU, without what is not read.
CALLS = """
  %a = (bf16[2]) custom-call(%b), window={size=3x3 pad=1_1x1_1}, custom_call_target="__cudnn$convForward", x
  %c = (bf16[2]) custom-call(%d), window={size=8x8}, feature_group_count=64, y={highest}, custom_call_target="__cudnn$convForward"
  %e = f32[2] fusion(%f), feature_group_count=2
  %g = (bf16[2]) custom-call(%h), window={size=3x3}, custom_call_target="__cudnn$convForward"
  %i = (bf16[2]) custom-call(%j), window={size=1x1}, feature_group_count=8, custom_call_target="__cudnn$convBackwardFilter"
"""  # noqa: E501


def test_a_gpus_convolutions_are_counted_by_kind_groups_and_window():
    assert [tuple(x.values()) for x in convolutions(CALLS)] == [
        ("BackwardFilter", 8, "1x1", 1),
        ("Forward", 1, "3x3", 2),
        ("Forward", 64, "8x8", 1),
    ]
    assert convolutions(TEXT) == []


def test_bytes_of_a_type():
    assert num_bytes("f32[2,3]{1,0:T(8,128)}") == 24
    assert num_bytes("(bf16[4]{0}, (u8[3], pred[]), s64[])") == 8 + 3 + 1 + 8
    assert num_bytes("f8e4m3fn[10]") == 10 and num_bytes("token[]") == 0


@pytest.mark.parametrize("target", ["v5e", "v7:2x2", "h100:0", "h100:2x2", "v5e:2x", "", "tpu"])
def test_a_target_that_cannot_be_is_one_line(target):
    with pytest.raises(ValueError, match=r"unknown target .*: give KIND:SHAPE, as v5e:1x1"):
        ahead.kind_of(target)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--target=v5e:2x2",), "--config is required: NAME:METHOD of a shipped config"),
        (("--config=digits:dp_sgd",), "--target is required: for example v5e:1x1"),
        (("--config=digits:dp_sgd", "--target=z"), "unknown target 'z': give KIND:SHAPE"),
    ],
)
def test_the_script_says_in_one_line_what_it_lacks_and_writes_nothing(given, message, tmp_path):
    file = tmp_path / "answer.json"
    done = run_command("scripts.benchmarks.hardware", *given, f"--out={file}")
    assert done.returncode == 2 and not file.exists()
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_a_microbatch_that_is_no_number_is_refused():
    config = digits.get_config()
    config.microbatch_size = "auto"
    with pytest.raises(ValueError, match=r"microbatch_size must be from 1 .* got auto"):
        ahead.look(config, "v5e:1x1", [])


def test_held_out_images_are_not_among_those_that_stand_in():
    section = digits.get_config().dataset
    section.name, section.holdout = "mnist", 10_000
    assert len(ahead._dataset(section).train.labels) == 50_000
    section.holdout = 0
    assert len(ahead._dataset(section).train.labels) == 60_000


def test_where_nothing_can_be_written_nothing_is_compiled(tmp_path):
    (tmp_path / "file").write_text("")
    for file in (tmp_path, tmp_path / "file" / "answer.json"):
        with pytest.raises(OSError, match=r"cannot be written|File exists|Not a directory"):
            files.check_writable(str(file))
    files.check_writable(str(tmp_path / "new" / "answer.json"))


def test_a_stand_in_has_the_sizes_and_no_memory():
    blank = datasets.stand_in("imagenet32")
    assert blank.train.images.shape == (1_281_167, 32, 32, 3)
    assert blank.train.images.strides == (0, 0, 0, 0)
    assert blank.train.images.dtype == np.uint8
    datasets.check(blank)
    with pytest.raises(datasets.DataError, match="the size of 'mine' is unknown"):
        datasets.stand_in("mine")


def compiled(num_devices):
    config = digits.get_config("bam_sam")
    config.update({"accountant": "rdp", "expected_batch_size": 64, "microbatch_size": 4})
    config.model.name = "linear"
    blank = datasets.load("digits")
    return ahead.compile_step(config, blank, jax.devices()[:num_devices])


@pytest.mark.slow
def test_devices_exchange_one_sum_and_nothing_that_grows_with_them():
    by_devices = {number: compiled(number)[:2] for number in (1, 2, 8)}
    for number, (built, program) in by_devices.items():
        total = {"all-reduce": 0, "all-gather": 0}
        for c in collectives(program.as_text()):
            total[c["kind"]] += c["count"] * c["bytes"]
        # A norm for each row, of which the ones that are not finite are counted.
        assert total["all-gather"] <= 4 * (built.plan.capacity + 8)
        words = 8 * built.num_params  # two of 32 bits for each
        assert total["all-reduce"] == 0 if number == 1 else 0 <= total["all-reduce"] - words <= 64
    num_bytes = {
        number: ahead.num_bytes_held(of_number[1]) for number, of_number in by_devices.items()
    }
    assert num_bytes[8] <= 1.02 * num_bytes[2]


def test_a_gather_of_the_data_would_be_seen():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gather = jax.jit(lambda x: 2 * x, in_shardings=split, out_shardings=whole)
    program = gather.lower(jax.ShapeDtypeStruct((64, 100), np.float32)).compile()
    (found,) = collectives(program.as_text())
    assert (found["kind"], found["bytes"]) == ("all-gather", 64 * 100 * 4)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_a_step_compiles_for_eight_tpus_with_one_sum_between_them(tmp_path):
    command = [sys.executable, "-m", "scripts.benchmarks.hardware", "--config=digits:dp_sgd"]
    command += ["--config.dataset.name=mnist", "--config.model.width=4", "--target=v5e:2x4"]
    file = tmp_path / "answer.json"
    environ = os.environ | {"XLA_FLAGS": ""}  # libtpu ends at some of the suite's, which are CPUs'
    done = subprocess.run([*command, f"--out={file}"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(file.read_text())
    assert answer["compiles"] and answer["fits"] and answer["num_devices"] == 8
    found, *norms = answer["collectives"]
    assert found["kind"] == "all-reduce" and found["count"] == 1
    assert 0 <= found["bytes"] - 8 * answer["num_params"] <= 64
    assert all(x["kind"] == "all-gather" and x["bytes"] <= 2**12 for x in norms)  # of each row
    assert answer["flop_per_step"] > 0


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"), reason="CUDA's compiler is not installed"
)
@pytest.mark.parametrize("form", ["grouped", "xla"])
@pytest.mark.parametrize(
    ("network", "total", "kernels", "as_large_as_images"),
    [
        (
            "cifar10:dp_sgd --config.model.width=16",
            8 + 7 + 8,  # forward, images, kernels
            {"3x3": 8},
            {"32x32": 2, "16x16": 3, "8x8": 1, "4x4": 2},
        ),
        (
            "imagenet32:dp_sgd --config.model.depth=10 --config.model.width=1",
            10 + 9 + 10,
            {"3x3": 7, "1x1": 3},
            {"32x32": 4, "31x31": 2, "16x16": 1, "15x15": 2, "8x8": 1},
        ),
    ],
)
def test_on_a_gpu_only_the_form_of_xla_has_windows_as_large_as_images(
    network, total, kernels, as_large_as_images, form, tmp_path
):
    command = [sys.executable, "-m", "scripts.benchmarks.hardware", "--target=h100"]
    command += [*f"--config={network}".split(), "--config.augment.views=2"]
    command += ["--config.microbatch_size=8", "--config.expected_batch_size=16"]
    command += [f"--config.convolution={form}", "--config.accountant=rdp"]
    file = tmp_path / "answer.json"
    environ = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run([*command, f"--out={file}"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    convolutions = json.loads(file.read_text())["convolutions"]
    assert sum(x["count"] for x in convolutions) == total
    grouped = [x for x in convolutions if x["groups"] > 1]
    kind, windows = {
        "grouped": ("BackwardFilter", kernels),
        "xla": ("Forward", as_large_as_images),
    }[form]
    assert {(x["kind"], x["groups"]) for x in grouped} == {(kind, 8)}
    assert {x["window"]: x["count"] for x in grouped} == windows
