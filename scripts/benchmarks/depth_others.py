"""The network of `depth` and its DP-SGD step in jax-privacy and in Opacus."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from scripts.benchmarks import timing

# A call that takes a step, and the seconds of compiling it; None if the library compiles nothing.
Step = tuple[Callable[[], Any], float | None]


class Problem(NamedTuple):
    """What every library gets.

    Attributes:
      loss: the loss of one example with bam's network, a function of parameters and a batch.
      params: the parameters of that network.
      batch: "image" of shape [n, 1, width], and "label".
      clip_norm, noise_multiplier, learning_rate: of DP-SGD.
    """

    loss: Callable[..., Any]
    params: Any
    batch: Any
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    learning_rate: float = 0.1


class Other(NamedTuple):
    """Another library.

    Attributes:
      label: its name in figures and tables.
      package: the package that it needs.
      step: makes its step.
      platforms: JAX's platforms on which it computes on the device that bam computes on.
    """

    label: str
    package: str
    step: Callable[[Problem], Step]
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


def jax_privacy(problem: Problem) -> Step:
    """The network of bam, with gradients and noise of jax-privacy."""
    from jax_privacy import noise_addition

    num_examples = len(problem.batch["label"])

    def step(params: Any, noise: Any, batch: Any) -> Any:
        clipped = jax_privacy_grad(problem)
        stddev = problem.noise_multiplier * clipped.l2_norm_bound
        privatizer = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=0)
        noised, noise = privatizer.update(clipped(params, batch), noise)
        rate = problem.learning_rate / num_examples
        return jax.tree.map(lambda p, g: p - rate * g, params, noised), noise

    first = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=0).init(problem.params)
    state = (problem.params, first, problem.batch)
    compiled, seconds = timing.compile_and_time(step, *state)
    return functools.partial(compiled, *state), seconds


def jax_privacy_grad(problem: Problem) -> Any:
    """The sum of clipped gradients by jax-privacy, as a function of parameters and a batch."""
    from jax_privacy import clipping

    return clipping.clipped_grad(problem.loss, l2_clip_norm=problem.clip_norm, keep_batch_dim=False)


def opacus(problem: Problem) -> Step:
    """The same network in PyTorch, with hooks of Opacus."""
    return opacus_step(problem)[1], None


def opacus_step(problem: Problem) -> tuple[Any, Callable[[], None]]:
    """The network in PyTorch, and a call that takes a step with it."""
    import torch
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    num_examples = len(problem.batch["label"])
    inputs = torch.tensor(np.array(problem.batch["image"]).reshape(num_examples, -1))
    labels = torch.tensor(np.array(problem.batch["label"]), dtype=torch.long)
    loss_fn = torch.nn.CrossEntropyLoss(reduction="sum")
    model = GradSampleModule(torch_network(problem.params), loss_reduction="sum")
    rate = problem.learning_rate / num_examples
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate),
        noise_multiplier=problem.noise_multiplier,
        max_grad_norm=problem.clip_norm,
        expected_batch_size=num_examples,
        loss_reduction="sum",
    )

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(inputs), labels).backward()
        optimizer.step()

    return model, step


def torch_network(params: Any) -> Any:
    """Bam's `deep_residual` with these parameters, in PyTorch."""
    import torch
    from torch import nn

    weights = layers(params)
    depth = len(weights)

    class DeepResidual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(*kernel.shape) for kernel, _ in weights)

        def forward(self, x: Any) -> Any:
            first, *blocks, last = self.layers
            x = torch.tanh(first(x))
            for block in blocks:
                x = x + torch.tanh(block(x)) / depth**0.5
            return last(x)

    model = DeepResidual()
    with torch.no_grad():
        for layer, (kernel, bias) in zip(model.layers, weights, strict=True):
            layer.weight.copy_(torch.tensor(kernel.T.copy()))
            layer.bias.copy_(torch.tensor(bias.copy()))
    return model


def layers(params: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns kernel and bias of each layer.

    In `params`, those of the blocks are stacked.
    """
    first, last = (params[f"Dense_{i}"] for i in (0, 1))
    stacked = [layer for name, layer in params.items() if not name.startswith("Dense_")]
    blocks = [
        jax.tree.map(lambda x, i=i: x[i], block["Dense_0"])
        for block in stacked
        for i in range(len(block["Dense_0"]["bias"]))
    ]
    return [(np.array(x["kernel"]), np.array(x["bias"])) for x in (first, *blocks, last)]


OTHERS = {
    "jax_privacy": Other("DP-SGD, jax-privacy", "jax_privacy", jax_privacy),
    "opacus": Other("DP-SGD, Opacus", "opacus", opacus, platforms=("cpu",)),
}
