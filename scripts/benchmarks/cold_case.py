"""Times a library's first steps in a fresh process.

`cold.py` starts it once for each case. It prints a line of JSON. Before the clock runs, it imports
only the standard library. It uses only functions that older checkouts of bam have, too, so that
`cold.py --tree` can compare them.
"""

import functools
import importlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

CLASSES, STEPS, DELTA = 10, 20, 1e-5
EPSILON = 3.0  # bam plans its noise from ε, so this stands for a noise multiplier of 1
CHANGE = 1.5  # ratio of the changed value of a number to the first
COMPILED = "/jax/core/compile/backend_compile_duration"


class Network(NamedTuple):
    """Blocks of conv 3×3 → GroupNorm → activation, then a linear layer.

    All libraries train it.

    Attributes:
      shape: height, width and channels of an image.
      width: default number of channels of the first block.
      groups: most groups of a GroupNorm.
      activation: its name in `jax.nn` and `torch.nn.functional`.
      blocks: for each block its channels divided by `width`, and an operation after it: "add" adds
        the input of the block marked "keep", "pool" averages 2×2 pixels.
      microbatch_size: the microbatch size of bam.
    """

    shape: tuple[int, int, int]
    width: int
    groups: int
    activation: str
    blocks: tuple[tuple[int, str], ...]
    microbatch_size: int

    @property
    def channels(self) -> list[tuple[int, int]]:
        """Channels into and out of each block."""
        outputs = [multiple * self.width for multiple, _ in self.blocks]
        return list(zip([self.shape[-1], *outputs[:-1]], outputs, strict=True))


# Name in `bam.models.MODELS` -> the same network; a test compares them.
NETWORKS = {
    "resnet9": Network(
        (32, 32, 3), 64, 32, "mish",
        ((1, ""), (2, "pool"), (2, "keep"), (2, "add"), (4, "pool"), (4, "pool"), (4, "keep"),
         (4, "add pool")),
        1,
    ),
    "convnet": Network((8, 8, 1), 16, 4, "relu", ((1, "pool"), (2, "pool")), 32),
}  # fmt: skip


class Numbers(NamedTuple):
    """The numbers of a run that do not change the structure of its program."""

    learning_rate: float = 0.1
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    radius: float = 0.05


class Problem(NamedTuple):
    """The network that a case trains, with its name, and the number of examples in a step."""

    name: str
    network: Network
    batch: int

    def rows(self) -> tuple[Any, Any]:
        """Random uint8 images and labels, twice as many as a step has."""
        import numpy as np

        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (2 * self.batch, *self.network.shape), dtype=np.uint8)
        return images, rng.integers(0, CLASSES, 2 * self.batch, dtype=np.int32)

    def float_rows(self) -> tuple[Any, Any]:
        """The rows with images in float32."""
        images, labels = self.rows()
        return images.astype("float32") / 127.5 - 1, labels


# The first `next` builds, the second makes the weights and takes the first step, each later one
# takes a step.
Training = Callable[[Numbers], Iterator[None]]


def ours(method: str, problem: Problem) -> Training:
    """A run of a config, as `bam train` makes it."""
    import jax
    import numpy as np

    from bam.core import sampling
    from bam.data import datasets
    from bam.training import loop, named_configs

    def training(numbers: Numbers) -> Iterator[None]:
        config = named_configs.load(f"base:{method}")
        config.update({"expected_batch_size": problem.batch, "num_steps": STEPS, "delta": DELTA})
        config.clip_norm, config.epsilon = numbers.clip_norm, EPSILON / numbers.noise_multiplier
        config.microbatch_size = min(problem.network.microbatch_size, problem.batch)
        config.model.update({"name": problem.name, "width": problem.network.width})
        config.optimizer.update({"name": "sgd", "learning_rate": numbers.learning_rate})
        if "radius" in config.method:
            config.method.radius = numbers.radius
        split = datasets.Split(*problem.rows())
        half = np.full(problem.network.shape[-1], 0.5, np.float32)
        data = datasets.Dataset("random", split, split, CLASSES, half, half)
        built = loop.build(config, data)
        yield
        state, rows = built.init(0), built.place_rows()
        for step in itertools.count(1):
            padded = sampling.pad(np.arange(problem.batch), built.plan.capacity, 0, step)
            state = jax.block_until_ready(built.step(state, built.batch(state, padded, rows)))
            yield

    return training


def ours_loop(problem: Problem) -> Training:
    """DP-SGD by `bam.PrivateTraining`, in a loop of its user."""
    import jax
    import optax

    import bam
    from bam import models

    module = models.create(problem.name, CLASSES, problem.network.width)
    # Outside of `training`: another setting has the same loss, and so the same program.
    model = models.as_functions(module, problem.network.shape)

    def training(numbers: Numbers) -> Iterator[None]:
        images, labels = problem.float_rows()
        data = {"image": images[:, None], "label": labels}
        private = bam.PrivateTraining(
            num_examples=len(labels),
            expected_batch_size=problem.batch,
            num_epochs=STEPS // 2,
            epsilon=EPSILON / numbers.noise_multiplier,
            delta=DELTA,
            clip=bam.clip_by_l2_norm(numbers.clip_norm),
        )
        size = min(problem.network.microbatch_size, problem.batch)
        gradient = private.gradient(bam.dp_sgd(model.loss), microbatch_size=size)
        optimizer = optax.chain(gradient, optax.sgd(numbers.learning_rate))
        yield
        params = model.init(jax.random.key(0))
        state = optimizer.init(params)
        for batch in private.batches(data):
            updates, state = optimizer.update(batch, state, params)
            params = jax.block_until_ready(optax.apply_updates(params, updates))
            yield

    return training


def jax_privacy(as_arguments: bool, problem: Problem) -> Training:
    """Returns the loop of jax-privacy's examples.

    With `as_arguments`, its numbers are arguments of the program, as a user can write by hand.
    """
    import jax
    import jax_privacy
    import optax
    from jax_privacy import noise_addition

    module = flax_network(problem.network)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        logits = module.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(numbers: Numbers, params: Any, noise: Any, images: Any, labels: Any) -> Any:
        clipped_grad = jax_privacy.clipped_grad(
            loss,
            l2_clip_norm=numbers.clip_norm,
            batch_argnums=(1, 2),
            normalize_by=problem.batch,
        )
        stddev = numbers.noise_multiplier * clipped_grad.l2_norm_bound
        privatizer = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=0)
        grads, noise = privatizer.update(clipped_grad(params, images, labels), noise)
        optimizer = optax.sgd(numbers.learning_rate)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return optax.apply_updates(params, updates), noise

    # One program: without `jit` every operation is a program, which takes longer to compile.
    init, shared = jax.jit(module.init), jax.jit(step)

    def training(numbers: Numbers) -> Iterator[None]:
        images, labels = (x[: problem.batch] for x in problem.float_rows())
        constant = jax.jit(functools.partial(step, numbers))
        update = functools.partial(shared, numbers) if as_arguments else constant
        yield
        params = init(jax.random.key(0), images[:1])
        noise = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=0).init(params)
        while True:
            params, noise = jax.block_until_ready(update(params, noise, images, labels))
            yield

    return training


def opacus(problem: Problem) -> Training:
    """Model, optimizer and loader from Opacus's `make_private`."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    def training(numbers: Numbers) -> Iterator[None]:
        images, labels = map(torch.tensor, problem.float_rows())
        data = TensorDataset(images.permute(0, 3, 1, 2).contiguous(), labels.long())
        module = torch_network(problem.network)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=numbers.learning_rate),
            data_loader=DataLoader(data, batch_size=problem.batch),
            noise_multiplier=numbers.noise_multiplier,
            max_grad_norm=numbers.clip_norm,
        )
        criterion = torch.nn.CrossEntropyLoss()
        yield
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
                yield

    return training


def flax_network(network: Network) -> Any:
    """The network in plain Flax."""
    import flax.linen as nn
    import jax

    activation = getattr(jax.nn, network.activation)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            blocks = zip(network.channels, network.blocks, strict=True)
            for (_, channels), (_, after) in blocks:
                if after == "keep":
                    shortcut = x
                x = nn.Conv(channels, (3, 3), use_bias=False)(x)
                groups = math.gcd(network.groups, channels)
                x = activation(nn.GroupNorm(groups, epsilon=1e-5)(x))
                if "add" in after:
                    x = x + shortcut
                if "pool" in after:
                    x = nn.avg_pool(x, (2, 2), (2, 2))
            return nn.Dense(CLASSES)(x.reshape(len(x), -1))

    return Net()


def torch_network(network: Network) -> Any:
    """The network in PyTorch, for images with their channels first."""
    import torch
    from torch.nn import functional

    nn, activation = torch.nn, getattr(functional, network.activation)
    channels = network.channels
    pools = sum("pool" in after for _, after in network.blocks)
    pixels = (network.shape[0] >> pools) * (network.shape[1] >> pools)

    class Net(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(
                nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in channels
            )
            self.norms = nn.ModuleList(
                nn.GroupNorm(math.gcd(network.groups, o), o) for _, o in channels
            )
            self.linear = nn.Linear(pixels * channels[-1][1], CLASSES)

        def forward(self, x: Any) -> Any:
            layers = zip(self.convs, self.norms, network.blocks, strict=True)
            for conv, norm, (_, after) in layers:
                if after == "keep":
                    shortcut = x
                x = activation(norm(conv(x)))
                if "add" in after:
                    x = x + shortcut
                if "pool" in after:
                    x = functional.avg_pool2d(x, 2)
            return self.linear(x.flatten(1))

    return Net()


class Case(NamedTuple):
    """A library and a method to measure.

    Attributes:
      label: its name for readers.
      package: the package that must be installed.
      prepare: imports the library, and returns the training.
      changes: the numbers that are changed, one at a time, after the first steps.
    """

    label: str
    package: str
    prepare: Callable[[Problem], Training]
    changes: tuple[str, ...]


_PRIVATE = ("learning_rate", "clip_norm", "noise_multiplier")
CASES = {
    "ours_nonprivate": Case(
        "ours, not private", "bam", functools.partial(ours, "non_private"), _PRIVATE[:1]
    ),
    "ours_dp_sgd": Case("ours, DP-SGD", "bam", functools.partial(ours, "dp_sgd"), _PRIVATE),
    "ours_bam_sam": Case(
        "ours, BAM-SAM", "bam", functools.partial(ours, "bam_sam"), (*_PRIVATE, "radius")
    ),
    "ours_loop": Case("ours, DP-SGD by PrivateTraining", "bam", ours_loop, _PRIVATE),
    "jax_privacy": Case(
        "jax-privacy, as in its examples", "jax_privacy",
        functools.partial(jax_privacy, False), _PRIVATE,
    ),
    "jax_privacy_arguments": Case(
        "jax-privacy, numbers made arguments by hand", "jax_privacy",
        functools.partial(jax_privacy, True), _PRIVATE,
    ),
    "opacus": Case("Opacus", "opacus", opacus, _PRIVATE),
}  # fmt: skip


def case_of(key: str) -> Case:
    """The case of a key in the file: CASE, or CASE@NAME for the checkout NAME."""
    name, _, tree = key.partition("@")
    case = CASES[name]
    return case._replace(label=f"{case.label} ({tree})") if tree else case


class Clock:
    """Measures the seconds of each phase, and counts the programs that XLA compiles in it."""

    def __init__(self) -> None:
        """Starts without a phase."""
        self.phases: dict[str, dict[str, float]] = {}
        self._compiled: list[float] = []

    def hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Counts a compilation, as a listener of `jax.monitoring`."""
        if event == COMPILED:
            self._compiled.append(duration_secs)

    def time(self, phase: str, call: Callable[[], Any]) -> Any:
        """Calls, measures the call as a phase, and returns its result."""
        self._compiled, started = [], time.perf_counter()
        result = call()
        self.phases[phase] = {
            "seconds": time.perf_counter() - started,
            "compilations": len(self._compiled),
            "xla_seconds": sum(self._compiled),
        }
        return result


def main(started: float, name: str, network: str, width: int, batch: int, steps: bool) -> None:
    """Measures a case.

    Without `steps` it only imports the case's packages.
    """
    case, clock = CASES[name], Clock()
    shape = NETWORKS[network]
    problem = Problem(network, shape._replace(width=width or shape.width), batch)

    def prepare() -> Training:
        if name != "opacus":
            import jax

            jax.monitoring.register_event_duration_secs_listener(clock.hear)
        return case.prepare(problem)

    training = clock.time("import", prepare)
    results: dict[str, Any] = {"file": importlib.import_module(case.package).__file__}
    if steps:
        first = training(Numbers())
        clock.time("build", functools.partial(next, first))
        clock.time("first_step", functools.partial(next, first))
        results["seconds_to_first_step"] = time.time() - started
        clock.time("second_step", functools.partial(next, first))
        del first
        for change in case.changes:
            other = Numbers()._replace(**{change: CHANGE * getattr(Numbers(), change)})
            again = training(other)
            clock.time(f"{change}_build", functools.partial(next, again))
            clock.time(change, functools.partial(next, again))
    print(json.dumps(results | {"phases": clock.phases}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
