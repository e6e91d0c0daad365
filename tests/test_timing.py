"""Counts of operations that one can do by hand, and benchmarks that run."""

import json

import jax
import jax.numpy as jnp
import pytest

from bam import models
from bam.models.layers import conv2d, convolutions_as
from bam.training import arithmetic
from scripts.benchmarks import timing
from tests.cases import run_command


def test_products_convolutions_and_scans_cost_what_one_counts_by_hand():
    def as_xla(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)

    def seven_turns(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=7)[0]

    images, kernel = jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, 4))
    of_kernel = 2 * (2 * 6 * 6 * 4) * (3 * 3 * 3)
    assert arithmetic.matrix_flops(jnp.matmul, jnp.ones((3, 4)), jnp.ones((4, 5))) == 2 * 3 * 4 * 5
    assert arithmetic.matrix_flops(as_xla, images, kernel) == of_kernel
    with convolutions_as("matmul"):
        assert arithmetic.matrix_flops(conv2d, images, kernel) == of_kernel
    assert arithmetic.matrix_flops(seven_turns, jnp.ones((3, 3))) == 7 * 2 * 27


def test_the_median_and_quartiles_are_those_by_hand():
    assert timing.summarize([4.0, 1.0, 2.0, 3.0, 5.0], 9.0) == timing.Timing(3.0, 2.0, 4.0, 9.0)
    assert timing.summarize([4.0], 9.0) == timing.Timing(4.0, 4.0, 4.0, 9.0)


def test_calls_are_timed_in_turn_after_one_untimed_round():
    order = []
    seconds = timing.measure(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, trials=2, repeats=2
    )
    assert "".join(order) == "aabb" * 3
    assert {name: len(found) for name, found in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("depth", [2, 3, 12])
def test_the_deep_network_has_a_layers_weights_per_layer_and_one_compiled_block(depth):
    module = models.create("deep_residual", 10, 8, depth=depth)
    model = models.as_functions(module, (8,))
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == (8 * 8 + 8) * (depth - 1) + 8 * 10 + 10
    program = str(jax.make_jaxpr(model.logits)(params, jnp.ones((2, 8))))
    assert program.count("tanh") == min(2, depth - 1)


def test_the_depth_benchmark_writes_every_row_and_the_figure(tmp_path):
    done = run_command(
        "scripts.benchmarks.depth", f"--out={tmp_path}/depth", "--depths=2", "--width=4",
        "--batch=2", "--trials=2", "--repeats=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "depth.json").read_text())
    assert len(found["rows"]) == 5
    assert all(0 < r["low"] <= r["median"] <= r["high"] for r in found["rows"])
    assert (tmp_path / "depth.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_step_benchmark_writes_what_each_of_its_steps_takes(tmp_path):
    done = run_command(
        "scripts.benchmarks.step", f"--out={tmp_path}/step.json", "--width=1", "--batch=4",
        "--microbatch=1", "--views=2", "--trials=1", "--only=bam_sam_one_view_ms",
        "--memory_batches=4", timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "step.json").read_text())
    assert set(measured["observations_ms"]) == {"dp_sgd_ms", "bam_sam_one_view_ms"}
    assert all(measured[name] > 0 for name in measured["observations_ms"])
    assert measured["matmul_gflops"] > measured["dp_sgd_gflops"] > 0
    assert measured["peak_memory_mb"]["4"] > 0


def test_the_accelerators_script_goes_on_where_it_stopped(tmp_path):
    done = {"tests": {"end": "done", "seconds": 1.0, "last": []}}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/pieces.json").write_text(json.dumps(done))
    stopped = run_command(
        "scripts.benchmarks.accelerator", "--device=x", f"--workdir={tmp_path}/runs",
        f"--out={tmp_path}", "--seconds=5",
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert "step and what follows: the same command goes on there" in stopped.stdout
    assert json.loads((tmp_path / "accelerator_x.json").read_text())["pieces"] == done
