"""One training step here and in other libraries: same network, same weights, same images.

make bench-peers        (makes an environment for it; see the Makefile)

Our steps take batches as a run draws them, with empty places. All others take a full batch.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import bam
from bam import models, provenance, waits
from bam.cli import command, jax_setup, screen
from bam.core import engine
from bam.core.oracles import Method
from bam.training import devices, duration
from scripts.benchmarks import performance, timing
from scripts.benchmarks.performance import PEERS

_OUT = flags.DEFINE_string("out", "", "JSON file to write")
_BATCH = flags.DEFINE_integer("batch", 32, "examples per step", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "width of ResNet-9", lower_bound=1)
_TRIALS = flags.DEFINE_integer("trials", 7, "rounds through all peers", lower_bound=1)
_ONLY = flags.DEFINE_list("only", [], "peers to time; none: all")

LIBRARIES = ("jax-privacy", "torch", "opacus")
LEARNING_RATE = 1e-3
RADIUS = 0.05
TOLERANCE = 1e-3  # relative L2 distance of clipped sums; formulations differ by float32 rounding


class Problem(NamedTuple):
    """The input of every peer: NHWC images, Flax parameters, a clip norm that half exceed."""

    params: Any
    images: np.ndarray
    labels: np.ndarray
    clip_norm: float


class Peer(NamedTuple):
    """Steps to time, with their number of examples, and the noiseless clipped sum of a full batch.

    The sum is None where nothing is clipped.
    """

    step: Callable[[], Any]
    num_examples: int
    clipped_sum: Callable[[], Any] | None


def main() -> None:
    """Checks that all private peers compute one clipped sum, then times every step in turn."""
    jax_setup.use_compilation_cache()
    with waits.compiling(screen.show, "the norms of the gradients"):
        problem = _problem()
    peers, only = jax_peers(problem), _ONLY.value
    if not only or not peers.keys() >= {*only}:
        peers |= torch_peers(problem)
    peers = {name: peers[name] for name in only or [x for x in PEERS if x in peers]}
    ours = peers["ours_dp_sgd"].clipped_sum
    with waits.compiling(screen.show, PEERS["ours_dp_sgd"]):
        expected = ours and ours()
    errors = {}
    for name, peer in peers.items():
        if peer.clipped_sum is None:
            continue
        with waits.awaited(screen.show, f"{PEERS[name]}: its clipped sum"):
            errors[name] = _relative_distance(peer.clipped_sum(), expected)
        if not errors[name] <= TOLERANCE:
            raise AssertionError(f"{name} computes another clipped sum: off by {errors[name]:.1e}")
        screen.say(f"{PEERS[name]:<50} same clipped sum, to {errors[name]:.1e}")
    seconds = timing.measure({n: p.step for n, p in peers.items()}, _TRIALS.value, repeats=1)
    milliseconds = {
        name: [1e3 * s / peers[name].num_examples for s in values]
        for name, values in seconds.items()
    }
    for name, values in milliseconds.items():
        screen.say(f"{PEERS[name]:<50} {statistics.median(values):8.2f} ms per example")
    results = {
        "batch": _BATCH.value,
        "width": _WIDTH.value,
        "trials": _TRIALS.value,
        "num_examples": {name: peer.num_examples for name, peer in peers.items()},
        "versions": provenance.versions(*LIBRARIES),
        "milliseconds_per_example": {n: statistics.median(f) for n, f in milliseconds.items()},
        "observations": milliseconds,
        "clipped_sum_error": errors,
    }
    timing.keep(Path(_OUT.value), results)


def jax_peers(problem: Problem) -> dict[str, Peer]:
    """bam, jax-privacy and a step by `vmap`, as one writes it by hand."""
    from jax_privacy import clipping

    module = models.create("resnet9", 10, _WIDTH.value)
    shape = problem.images.shape[1:]
    ours = models.as_functions(module, shape)
    stock = models.as_functions(module, shape, convolution="xla")
    batch = {
        "image": jnp.asarray(problem.images[:, None]),
        "label": jnp.asarray(problem.labels, jnp.int32),
    }
    clip = bam.clip_by_l2_norm(problem.clip_norm)
    clipped_grad = functools.partial(
        clipping.clipped_grad, l2_clip_norm=problem.clip_norm, keep_batch_dim=False
    )
    mesh = devices.mesh(devices.visible())
    shared = problem._replace(params=devices.replicate(problem.params, mesh))
    drawn = _drawn(batch)
    num_drawn = sum(int(mask.sum()) for _, mask in drawn)

    def ours_with(oracle: Method) -> Callable[..., Any]:
        return lambda params, batch, mask=None, noise=None: bam.clipped_sum(
            oracle.grad, clip, params, batch, mask=mask, microbatch_size=1, mesh=mesh, noise=noise
        )[0]

    def our_step(oracle: Method) -> Callable[[], Any]:
        """The steps of a run, whose noise is added to the integers of a sum, not to floats."""

        @jax.jit
        def update(params: Any, batch: Any, mask: Any, noise: bam.GaussianNoise) -> Any:
            rate = LEARNING_RATE / len(problem.labels)
            noised = ours_with(oracle)(params, batch, mask, noise)
            return jax.tree.map(lambda p, g: p - rate * g, params, noised)

        params, noises = shared.params, itertools.count()
        key = bam.secret_key()

        def step() -> Any:
            nonlocal params
            for batch in drawn:
                noise = bam.gaussian_noise(clip, 1.0, key, next(noises))
                params = jax.block_until_ready(update(params, *batch, noise))
            return params

        return step

    def by_vmap(params: Any, batch: Any) -> Any:
        grads = jax.vmap(jax.grad(stock.loss), (None, 0))(params, batch)
        norms = jax.vmap(optax.tree.norm)(grads)
        factors = jnp.minimum(1.0, problem.clip_norm / norms)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)

    @jax.jit
    def ordinary(params: Any, batch: Any, mask: Any) -> Any:
        return engine.plain_sum(ours.loss, params, batch, mask=mask, microbatch_size=1, mesh=mesh)

    def peer(total: Callable[..., Any], problem: Problem) -> Peer:
        step = _jax_step(total, problem, [(batch,)])
        return Peer(step, len(problem.labels), lambda: total(problem.params, batch))

    dp_sgd = bam.dp_sgd(ours.loss)
    our_sum = jax.jit(ours_with(dp_sgd))
    return {
        "jax_vmap": peer(jax.jit(by_vmap), problem),
        "jax_privacy": peer(jax.jit(clipped_grad(stock.loss)), problem),
        "jax_privacy_matmul": peer(jax.jit(clipped_grad(ours.loss)), problem),
        "ours_dp_sgd": Peer(our_step(dp_sgd), num_drawn, lambda: our_sum(shared.params, batch)),
        "ours_bam_sam": Peer(our_step(bam.bam_sam(ours.loss, RADIUS)), num_drawn, None),
        "ours_nonprivate": Peer(_jax_step(ordinary, shared, drawn, private=False), num_drawn, None),
    }


def _drawn(batch: Any) -> list[tuple[Any, np.ndarray]]:
    """Batches as a run draws them: rows of the full batch, with empty places, and the mask."""
    built, drawn = performance.experiment("dp_sgd", _BATCH.value, {}), []
    for padded in duration.drawn_batches(built, timing.NUM_BATCHES):
        mask = np.asarray(padded.mask)
        rows = np.where(mask, padded.indices % _BATCH.value, padded.indices)
        drawn.append((padded._replace(indices=rows).take(batch), mask))
    return drawn


def torch_peers(problem: Problem) -> dict[str, Peer]:
    """PyTorch and Opacus."""
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    images = torch.tensor(problem.images.transpose(0, 3, 1, 2).copy())
    labels = torch.tensor(problem.labels, dtype=torch.long)
    loss_fn = torch.nn.CrossEntropyLoss(reduction="sum")
    private = {
        "max_grad_norm": problem.clip_norm,
        "expected_batch_size": len(labels),
        "loss_reduction": "sum",
    }

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / len(labels))

    def opacus(ghost: bool, noise_multiplier: float) -> tuple[Any, Callable[[], Any]]:
        model = _torch_resnet9(problem.params)
        criterion = loss_fn
        if ghost:
            model = GradSampleModuleFastGradientClipping(
                model, max_grad_norm=problem.clip_norm, loss_reduction="sum"
            )
            optimizer = DPOptimizerFastGradientClipping(
                sgd(model), noise_multiplier=noise_multiplier, **private
            )
            criterion = DPLossFastGradientClipping(model, optimizer, loss_fn, "sum")
        else:
            model = GradSampleModule(model, loss_reduction="sum")
            optimizer = DPOptimizer(sgd(model), noise_multiplier=noise_multiplier, **private)

        def step() -> None:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()

        return model, step

    def opacus_sum(ghost: bool) -> Callable[[], Any]:
        def total() -> Any:
            model, step = opacus(ghost, 0.0)
            step()
            return [p.grad.detach().numpy() for p in model.parameters()]

        return total

    ordinary = _torch_resnet9(problem.params)
    ordinary_sgd = sgd(ordinary)

    def ordinary_step() -> None:
        ordinary_sgd.zero_grad()
        loss_fn(ordinary(images), labels).backward()
        ordinary_sgd.step()

    return {
        "torch_nonprivate": Peer(ordinary_step, len(labels), None),
        "opacus_hooks": Peer(opacus(False, 1.0)[1], len(labels), opacus_sum(False)),
        "opacus_ghost": Peer(opacus(True, 1.0)[1], len(labels), opacus_sum(True)),
    }


def _problem() -> Problem:
    module = models.create("resnet9", 10, _WIDTH.value)
    model = models.as_functions(module, (32, 32, 3))
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(_BATCH.value, 32, 32, 3)).astype(np.float32)
    labels = rng.integers(0, 10, _BATCH.value).astype(np.int32)
    batch = {"image": jnp.asarray(images[:, None]), "label": jnp.asarray(labels)}
    _, norms = jax.jit(
        lambda p, b: bam.clipped_sum(
            bam.dp_sgd(model.loss).grad,
            bam.clip_by_l2_norm(1.0),
            p,
            b,
            mask=None,
            microbatch_size=1,
        )
    )(params, batch)
    return Problem(params, images, labels, float(np.median(norms)))


def _jax_step(
    total: Callable[..., Any], problem: Problem, batches: Sequence[Any], private: bool = True
) -> Callable[[], Any]:
    """Returns steps of sum, noise and SGD, one for each batch.

    Each starts from the weights of the step before.
    """
    params, rate = problem.params, LEARNING_RATE / len(problem.labels)

    @jax.jit
    def update(params: Any, grads: Any, key: Any) -> Any:
        if private:
            noise = optax.tree.random_like(key, grads, jax.random.normal)
            grads = jax.tree.map(lambda g, z: g + problem.clip_norm * z, grads, noise)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    keys = map(jax.random.key, itertools.count())

    def step() -> Any:
        nonlocal params
        for batch in batches:
            params = jax.block_until_ready(update(params, total(params, *batch), next(keys)))
        return params

    return step


def _torch_resnet9(params: Any) -> Any:
    """The Flax ResNet-9 with these parameters, in PyTorch."""
    import torch
    from torch import nn

    class ResNet9(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kernels = [params[f"Conv_{i}"]["kernel"] for i in range(8)]
            self.convs = nn.ModuleList(
                nn.Conv2d(k.shape[2], k.shape[3], 3, padding=1, bias=False) for k in kernels
            )
            self.norms = nn.ModuleList(
                nn.GroupNorm(int(np.gcd(32, k.shape[3])), k.shape[3]) for k in kernels
            )
            self.linear = nn.Linear(*params["Dense_0"]["kernel"].shape)
            self.mish, self.pool = nn.Mish(), nn.AvgPool2d(2)

        def block(self, i: int, x: Any) -> Any:
            return self.mish(self.norms[i](self.convs[i](x)))

        def forward(self, x: Any) -> Any:
            x = self.pool(self.block(1, self.block(0, x)))
            x = x + self.block(3, self.block(2, x))
            x = self.pool(self.block(5, self.pool(self.block(4, x))))
            x = x + self.block(7, self.block(6, x))
            return self.linear(self.pool(x).flatten(1))

    model = ResNet9()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), _from_flax(params), strict=True):
            parameter.copy_(torch.tensor(value.copy()))
    return model


def _from_flax(params: Any) -> list[np.ndarray]:
    """Kernels, then (scale, bias) of the norms, then the linear layer, in PyTorch's layouts."""
    kernels = [np.asarray(params[f"Conv_{i}"]["kernel"]).transpose(3, 2, 0, 1) for i in range(8)]
    norms = [np.asarray(params[f"GroupNorm_{i}"][n]) for i in range(8) for n in ("scale", "bias")]
    linear = np.asarray(params["Dense_0"]["kernel"])
    in_pixels = linear.reshape(2, 2, -1, linear.shape[1]).transpose(3, 2, 0, 1)
    flat = in_pixels.reshape(linear.shape[1], -1)
    return [*kernels, *norms, flat, np.asarray(params["Dense_0"]["bias"])]


def _relative_distance(total: Any, expected: Any) -> float:
    """Relative L2 distance of two sums, each a Flax tree or a list in PyTorch's order."""
    flat, reference = (
        np.concatenate([np.ravel(x) for x in (y if isinstance(y, list) else _from_flax(y))])
        for y in (total, expected)
    )
    return float(np.linalg.norm(flat - reference) / np.linalg.norm(reference))


if __name__ == "__main__":
    command.run_script(main, ["out"])
