"""Compiling for devices that are not there, and reading what the compiler says."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bam.cli import ahead, console
from bam.cli.ahead import collectives, computations, num_bytes, walk
from bam.core import sampling
from bam.data import datasets
from configs import digits

ROOT = Path(__file__).parents[1]

# Two loops, one of known turns; a fusion with a product; an all-reduce of 80 and 4 bytes.
TEXT = """HloModule jit_step, is_scheduled=true

%fused (p: bf16[4,4]) -> bf16[4,4] {
  %p = bf16[4,4]{1,0} parameter(0)
  ROOT %dot.1 = bf16[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%known (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%c), index=1
  ROOT %add.1 = f32[8]{0} add(%x, %x), backend_config={"estimated_cycles":"10"}
}

%turning (c2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c2 = (s32[], f32[8]{0:T(8,128)}) parameter(0)
  %a = bf16[4,4]{1,0} constant({...})
  %mul = bf16[4,4]{1,0} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"7"}
  %v = (s32[], f32[8]{0}) while(%c2), condition=%below_six, body=%counted
  ROOT %w = (s32[], f32[8]{0}) while(%c2), condition=%none, body=%known, backend_config={"known_trip_count":{"n":"3"}}
}

%counted (c4: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c4 = (s32[], f32[8]{0}) parameter(0)
  ROOT %add.2 = f32[8]{0} negate(%c4), backend_config={"estimated_cycles":"1000"}
}

%below_six (c5: (s32[], f32[8])) -> pred[] {
  %six = s32[]{:T(128)} constant(6)
  %c5 = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c5), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %six), direction=LT, backend_config={"used":[]}
}

%none (c3: (s32[], f32[8])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0:T(256)S(1)} parameter(0)
  %all-reduce.1 = (s32[10,2]{1,0}, s32[]) all-reduce(%p0, %p0), to_apply=%none, backend_config={"estimated_cycles":"100"}
  ROOT %loop = (s32[], f32[8]{0}) while(%p0), condition=%none, body=%turning, metadata={op_name="jit(step)/microbatches/while"}
}
"""  # noqa: E501


def test_what_is_inside_loops_counts_once_per_turn():
    steps = list(walk(computations(TEXT), lambda scope: 5 if "microbatches" in scope else 0))
    seen = {step.name: times for step, times in steps}
    # It counts up to three, by the compiler; to six, by its condition; and is a part of a fusion.
    assert seen["add.1"] == 5 * 3 and seen["add.2"] == 5 * 6 and "dot.1" not in seen
    assert seen["mul"] == 5 and seen["all-reduce.1"] == 1
    cycles = sum(int(step.attribute(ahead.CYCLES) or 0) * times for step, times in steps)
    assert cycles == 100 + 5 * (7 + 3 * 10 + 6 * 1000)
    assert collectives(steps) == [{"kind": "all-reduce", "count": 1, "bytes": 84}]


@pytest.mark.parametrize(
    ("q", "devices", "size", "expected"),
    [
        (1.0, 1, 64, 16),  # 15.6 and a part
        (1.0, 4, 64, 4),
        (0.5, 1, 1, 500),
        (0.5, 1, 4, 130),  # 125, and the fullest of four places
        (0.512, 8, 64, 2),  # 8 for each place on average; the fullest of 64 has more
    ],
)
def test_turns_are_those_of_poisson_draws(
    q, devices, size, expected, without_the_tests_type_checks
):
    plan = SimpleNamespace(mechanism_name="poisson", private=True, num_examples=1000)
    plan.sampling_prob, plan.capacity = q, sampling.usual_capacity(1000, q)
    found = np.mean(ahead.turns_of_draws(plan, devices, size))
    assert found == pytest.approx(expected, rel=0.02)


def test_bytes_of_a_type():
    assert num_bytes("f32[2,3]{1,0:T(8,128)}") == 24
    assert num_bytes("(bf16[4]{0}, (u8[3], pred[]), s64[])") == 8 + 3 + 1 + 8
    assert num_bytes("f8e4m3fn[10]") == 10 and num_bytes("token[]") == 0


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        computations("HloModule nothing")


@pytest.mark.parametrize("target", ["v5e", "v7:2x2", "h100:0", "h100:2x2", "v5e:2x", "", "tpu"])
def test_a_target_that_cannot_be_is_one_line(target):
    with pytest.raises(ValueError, match=r"unknown target .*; for example v5e:1x1"):
        ahead.kind_of(target)


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
            console.check_writable(str(file))
    console.check_writable(str(tmp_path / "new" / "answer.json"))


def test_a_stand_in_has_the_sizes_and_no_memory():
    blank = datasets.stand_in("imagenet32")
    assert blank.train.images.shape == (1_281_167, 32, 32, 3)
    assert blank.train.images.strides == (0, 0, 0, 0)
    assert blank.train.images.dtype == np.uint8
    datasets.check(blank)
    with pytest.raises(datasets.DataError, match="the size of 'mine' is not known"):
        datasets.stand_in("mine")


def compiled(num_devices):
    config = digits.get_config("bam_sam")
    config.update({"accountant": "rdp", "expected_batch_size": 64, "microbatch_size": 4})
    config.model.name = "linear"
    blank = datasets.load("digits")
    return ahead.compile_step(config, blank, jax.devices()[:num_devices])


def exchanged(program):
    return collectives(walk(computations(program.as_text()), lambda scope: 1))


@pytest.mark.slow
def test_devices_exchange_one_sum_and_nothing_that_grows_with_them():
    by_devices = {number: compiled(number)[:2] for number in (1, 2, 8)}
    for number, (built, program) in by_devices.items():
        total = {"all-reduce": 0, "all-gather": 0}
        for c in exchanged(program):
            total[c["kind"]] += c["count"] * c["bytes"]
        # A norm for each row, of which the ones that are not finite are counted.
        assert total["all-gather"] <= 4 * (built.plan.capacity + 8)
        words = 8 * built.num_params  # two of 32 bits for each
        assert total["all-reduce"] == 0 if number == 1 else 0 <= total["all-reduce"] - words <= 64
    held = {number: ahead.num_bytes_held(program) for number, (_, program) in by_devices.items()}
    assert held[8] <= 1.02 * held[2]


def test_the_loops_of_a_step_are_those_whose_turns_are_counted():
    scopes = []
    list(walk(computations(compiled(1)[1].as_text()), lambda scope: scopes.append(scope) or 1))
    assert {"/".join(x.split("/")[-2:]) for x in scopes} >= {"carries/while", "microbatches/while"}


def test_a_gather_of_the_data_would_be_seen():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gather = jax.jit(lambda x: 2 * x, in_shardings=split, out_shardings=whole)
    program = gather.lower(jax.ShapeDtypeStruct((64, 100), np.float32)).compile()
    (found,) = exchanged(program)
    assert (found["kind"], found["bytes"]) == ("all-gather", 64 * 100 * 4)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_a_step_compiles_for_eight_tpus_with_one_sum_between_them(tmp_path):
    command = [sys.executable, "-m", "bam", "hardware", "--config=configs/digits.py:dp_sgd"]
    command += ["--config.dataset.name=mnist", "--config.model.width=4", "--target=v5e:2x4"]
    file = tmp_path / "answer.json"
    environ = os.environ | {"XLA_FLAGS": ""}  # libtpu ends at some of the suite's, which are CPUs'
    done = subprocess.run([*command, f"--json={file}"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(file.read_text())
    assert answer["compiles"] and answer["fits"] and answer["num_devices"] == 8
    found, *norms = answer["collectives"]
    assert found["kind"] == "all-reduce" and found["count"] == 1
    assert 0 <= found["bytes"] - 8 * answer["num_params"] <= 64
    assert all(x["kind"] == "all-gather" and x["bytes"] <= 2**12 for x in norms)  # of each row
    assert answer["loops_counted_once"] == [] and answer["estimated_cycles_per_step"] > 0
