"""Counts of operations that one can do by hand, and benchmarks that run."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam import models
from bam.models.layers import conv2d, convolutions_as
from scripts.benchmarks import (
    arithmetic,
    cold_case,
    convolutions,
    depth_others,
    performance,
    timing,
)
from tests.cases import distance, norm64, run_command


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
    rows = found["rows"] + found["others"]
    assert all(0 < r["low"] <= r["median"] <= r["high"] for r in rows)
    assert (tmp_path / "depth.png").stat().st_size > 10_000
    table = (tmp_path / "depth.md").read_text()
    for name, other in depth_others.OTHERS.items():
        is_here = importlib.util.find_spec(other.package) is not None
        assert (name in {row["method"] for row in found["others"]}) == is_here
        assert (f"| {other.label} | not run |" in table) == (not is_here)
    lines = done.stdout.splitlines()  # a path is as long as it is
    assert max(len(x) for x in lines if not x.startswith("picture: ")) <= 80


def test_the_depth_benchmark_draws_again_from_its_file_and_refuses_an_unknown_method(tmp_path):
    kept = Path(__file__).parents[1] / "benchmarks/depth_cpu.json"
    (tmp_path / "depth.json").write_bytes(kept.read_bytes())
    command = ("scripts.benchmarks.depth", f"--out={tmp_path}/depth")
    again = run_command(*command, "--redraw")
    assert again.returncode == 0 and (tmp_path / "depth.png").stat().st_size > 10_000
    assert [x.name for x in tmp_path.glob("*.md")] == []  # it measures nothing
    refused = run_command(*command, "--methods=dp_sdg")
    assert refused.returncode == 2
    assert refused.stderr == "error: --methods: no method 'dp_sdg': did you mean dp_sgd?\n"


def deep_problem(clip_norm=0.5):
    """The depth benchmark's problem with five layers, and bam's sum of clipped gradients."""
    model = models.as_functions(models.create("deep_residual", 10, 8, depth=5), (8,))
    images = jax.random.normal(jax.random.key(1), (6, 1, 8))
    batch = {"image": images, "label": jnp.arange(6)}
    params, clip = model.init(jax.random.key(0)), bam.clip_by_l2_norm(clip_norm)
    grad = bam.dp_sgd(model.loss).grad
    total, _ = bam.clipped_sum(grad, clip, params, batch, mask=None, microbatch_size=6)
    return depth_others.Problem(model.loss, params, batch, clip_norm, noise_multiplier=0.0), total


def test_the_depth_benchmark_takes_the_same_clipped_sum_in_jax_privacy():
    pytest.importorskip("jax_privacy")
    problem, total = deep_problem()
    theirs = depth_others.jax_privacy_grad(problem)(problem.params, problem.batch)
    assert distance(theirs, total) < 1e-3 * norm64(total)
    assert distance(theirs, deep_problem(clip_norm=0.4)[1]) > 0.1 * norm64(total)  # the control


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_depth_benchmark_takes_the_same_clipped_sum_in_opacus():
    pytest.importorskip("opacus")
    problem, total = deep_problem()
    model, step = depth_others.opacus_step(problem)
    step()
    theirs = [x.grad.detach().numpy() for x in model.parameters()]
    ours = [x for kernel, bias in depth_others.layers(total) for x in (kernel.T, bias)]
    assert distance(theirs, ours) < 1e-3 * norm64(ours)


@pytest.mark.parametrize("method", ["dp_sgd", "non_private"])
def test_a_benchmarks_batches_are_those_of_a_run_and_each_step_takes_another(method):
    changes = performance.ONE_VIEW | {"model.width": 1, "microbatch_size": 8}
    built = performance.experiment(method, 16, changes)
    steps = timing.steps_of(built)
    plan = built.plan
    assert steps.capacity == plan.capacity > plan.expected_batch_size
    assert len(set(steps.drawn)) > 1 and max(steps.drawn) < steps.capacity
    masks = [np.asarray(plan.batch(0, step).mask) for step in (1, 2, 3, 4)]
    assert [mask.sum() for mask in masks] == steps.drawn
    assert all(np.any(~mask[: mask.sum()]) for mask in masks)  # at random places
    assert [int(steps.take()) for _ in range(2)] == [4, 8]
    assert steps.ms_per_example(2.0) == 2000 / sum(steps.drawn)


@pytest.mark.slow
def test_the_step_benchmark_writes_what_each_of_its_steps_takes(tmp_path):
    done = run_command(
        "scripts.benchmarks.step", f"--out={tmp_path}/step.json", "--width=1", "--batch=8",
        "--microbatch=1", "--views=2", "--trials=1", "--only=bam_sam_one_view_ms",
        "--memory_batches=4", timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "step.json").read_text())
    assert set(measured["observations_ms"]) == {"dp_sgd_ms", "bam_sam_one_view_ms"}
    assert all(measured[name] > 0 for name in measured["observations_ms"])
    assert measured["matmul_gflops"] > measured["dp_sgd_gflops"] > 0
    assert measured["peak_memory_mb"]["4"] > 0
    assert set(measured["drawn"]) == set(measured["capacity"]) == set(measured["observations_ms"])


def test_the_convolutions_benchmark_times_each_form_beside_ordinary_training(tmp_path):
    done = run_command(
        "scripts.benchmarks.convolutions", f"--out={tmp_path}/found", "--width=1", "--side=16",
        "--views=2", "--microbatches=3", "--trials=2", "--calls=2", "--precision=float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    forms = ["ordinary", "xla", "grouped", "matmul"]
    assert [row["form"] for row in written["rows"]] == 6 * forms
    assert all(0 < row["low"] <= row["us"] <= row["high"] for row in written["rows"])
    assert sum(row["count"] for row in written["rows"]) == 8 * len(forms)
    for row, form in zip(written["all_layers"], forms, strict=True):
        us = [r["count"] * r["us"] for r in written["rows"] if r["form"] == form]
        assert (row["form"], row["us"]) == (form, pytest.approx(sum(us)))
    assert (tmp_path / "found.md").read_text().count("\n") == 2 + 7 * len(forms)
    assert written["device"] and written["commit"] and written["versions"]["jax"]


def test_the_convolutions_benchmark_times_gradients_of_one_size_in_each_form():
    images, cotangents = jnp.ones((3, 2, 4, 4, 5)), jnp.ones((3, 2, 4, 4, 6))
    forms = {
        x: convolutions.gradients_of_examples(x)(images, cotangents) for x in convolutions.FORMS
    }
    for form in forms.values():
        assert form.shape == (3, 3, 3, 5, 6) and distance(form, forms["xla"]) < 1e-6 * norm64(form)
    together = convolutions.ordinary_gradient(images, cotangents)
    assert distance(together, forms["xla"].sum(axis=0)) < 1e-6 * norm64(together)


def test_the_convolutions_benchmark_wants_a_microbatch_for_each_number_of_views(tmp_path):
    flags = (f"--out={tmp_path}/found", "--views=16", "--microbatches=64,512")
    refused = run_command("scripts.benchmarks.convolutions", *flags)
    assert refused.returncode == 2 and not list(tmp_path.iterdir())
    message = "error: --views and --microbatches need equally many numbers from 1\n"
    assert refused.stderr == message


@pytest.mark.parametrize("name", cold_case.NETWORKS)
def test_the_cold_benchmark_trains_one_network_in_all_libraries(name):
    network = cold_case.NETWORKS[name]._replace(width=8)
    model = models.as_functions(models.create(name, 10, 8), network.shape)
    params = model.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (2, *network.shape))
    logits = cold_case.flax_network(network).apply({"params": params}, images)
    assert jnp.allclose(logits, model.logits(params, images), atol=1e-4)
    other = cold_case.flax_network(network._replace(activation="tanh"))  # the control
    assert not jnp.allclose(other.apply({"params": params}, images), logits, atol=1e-2)


@pytest.mark.parametrize("name", cold_case.NETWORKS)
def test_the_cold_benchmarks_network_has_as_many_weights_in_torch(name):
    torch = pytest.importorskip("torch")
    network = cold_case.NETWORKS[name]._replace(width=8)
    height, width, channels = network.shape
    theirs = cold_case.torch_network(network)
    assert theirs(torch.zeros(2, channels, height, width)).shape == (2, cold_case.CLASSES)
    model = models.as_functions(models.create(name, 10, 8), network.shape)
    ours = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert sorted(p.numel() for p in theirs.parameters()) == sorted(x.size for x in ours)


def round_scaled(scale):
    """What a process of the cold benchmark prints, all seconds being so many times as large."""
    names = ("import", "build", "first_step", "learning_rate_build", "learning_rate")
    return {
        "seconds_to_first_step": 7.0 * scale,
        "phases": {
            name: {"seconds": seconds * scale, "compilations": 2 * k, "xla_seconds": 0.0}
            for k, (name, seconds) in enumerate(zip(names, (1, 2, 4, 3, 5), strict=True))
        },
    }


def test_rounds_of_the_cold_benchmark_are_summed_up_as_by_hand():
    summary = timing.summarize_cold([round_scaled(scale) for scale in (3, 1, 2, 5, 4)])
    assert summary["to_first_step"] == {"median": 21.0, "low": 14.0, "high": 28.0}
    assert summary["changes"] == {"learning_rate": {"median": 24.0, "low": 16.0, "high": 32.0}}
    step_facts = {"median": 12, "low": 8, "high": 16, "compilations": 4, "xla_seconds": 0}
    assert summary["phases"]["first_step"] == step_facts


def test_a_clock_counts_what_xla_compiles_in_a_phase():
    clock = cold_case.Clock()
    jax.monitoring.register_event_duration_secs_listener(clock.hear)
    try:
        fn, x = jax.jit(lambda x: x * 3.0 - 2), jnp.ones(7)
        assert clock.time("first", lambda: fn(x)).shape == (7,)
        clock.time("again", lambda: fn(x))
    finally:
        jax.monitoring.unregister_event_duration_listener(clock.hear)
    first, again = clock.phases["first"], clock.phases["again"]
    assert first["compilations"] == 1 and again["compilations"] == 0
    assert first["seconds"] >= first["xla_seconds"] > again["xla_seconds"] == 0


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--only=tensorflow", "no case 'tensorflow': choose from ours_nonprivate"),
        ("--network=vgg", "no network 'vgg': choose from resnet9, convnet"),
        ("--tree=old=/nowhere", "--tree=old=/nowhere: write NAME=FOLDER"),
    ],
)
def test_the_cold_benchmark_refuses_what_it_cannot_measure_before_it_measures(
    flag, error, tmp_path
):
    done = run_command("scripts.benchmarks.cold", f"--out={tmp_path}/cold.json", flag)
    assert done.returncode == 2 and error in done.stderr
    assert not (tmp_path / "cold.json").exists()


@pytest.mark.slow
def test_the_cold_benchmark_writes_what_each_case_takes(tmp_path):
    root = Path(__file__).parents[1]
    done = run_command(
        "scripts.benchmarks.cold", f"--out={tmp_path}/cold.json", "--rounds=1", "--width=4",
        "--batch=2", "--network=convnet", "--only=ours_bam_sam,ours_loop", f"--tree=old={root}",
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round 1: ours, BAM-SAM (old), convnet: " in done.stdout
    measured = json.loads((tmp_path / "cold.json").read_text())
    assert measured["commits"]["this"] == measured["commits"]["old"]
    cases = measured["summary"]["convnet"]
    assert set(cases) == {f"ours_{x}" for x in ("bam_sam", "bam_sam@old", "loop", "loop@old")}
    assert set(cases["ours_bam_sam"]["changes"]) == set(cold_case.Numbers._fields)
    for case in cases.values():
        phases = case["phases"]
        assert 0 < phases["first_step"]["median"] < case["to_first_step"]["median"]
        assert phases["first_step"]["compilations"] > 0 == phases["second_step"]["compilations"]
        assert 0 < phases["second_step"]["median"] < phases["first_step"]["median"]


def test_the_accelerators_script_goes_on_where_it_stopped(tmp_path):
    piece = {"end": "done", "seconds": 1.0, "last": []}
    done = {"tests": piece, "convolutions": piece}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/pieces.json").write_text(json.dumps(done))
    stopped = run_command(
        "scripts.benchmarks.accelerator", "--device=x", f"--workdir={tmp_path}/runs",
        f"--out={tmp_path}", "--seconds=5",
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert "not run: step and later pieces; the same command continues" in stopped.stdout
    assert json.loads((tmp_path / "accelerator_x.json").read_text())["pieces"] == done
    assert not (tmp_path / "runs/network.safetensors").exists()  # without data nothing is trained
    done |= dict.fromkeys(("step", "sizes", "depth", "peers", "dp_sgd", "bam_sam"), piece)
    (tmp_path / "runs/pieces.json").write_text(json.dumps(done))
    stopped = run_command(
        "scripts.benchmarks.accelerator", "--device=x", f"--workdir={tmp_path}/runs",
        f"--out={tmp_path}", "--seconds=5", f"--data={tmp_path}",
    )  # fmt: skip
    assert "not run: network and later pieces" in stopped.stdout, stopped.stderr
    assert (tmp_path / "runs/network.safetensors").stat().st_size > 4 * 684_464
