"""Tiny losses, examples and pytrees that several test files share."""

import atexit
import contextlib
import fcntl
import functools
import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
import weakref
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import bam
from bam.cli import main
from bam.core import privatize, pytree
from bam.data import datasets
from bam.sweep import comparison
from bam.sweep.method_config import method_config
from bam.training import loading
from configs import digits


def random_images(name, num_train, num_test, mean, std):
    """Images of 4 × 4 pixels in three classes, in memory alone."""
    rng = np.random.default_rng(5)
    splits = [
        datasets.Split(
            rng.integers(0, 256, (n, 4, 4, 1), np.uint8), rng.integers(0, 3, n, np.int32)
        )
        for n in (num_train, num_test)
    ]
    scale = np.full(1, mean, np.float32), np.full(1, std, np.float32)
    return datasets.Dataset(name, *splits, 3, *scale)


def tiny_digits(method="dp_sgd", **settings):
    """Returns the config of four steps of logistic regression on digits, which is quick to plan.

    A setting `a__b` is the key `a.b`.
    """
    config = digits.get_config(method)
    tiny = {"model.name": "linear", "accountant": "rdp", "num_steps": 4, "eval.every": 0}
    config.update_from_flattened_dict(tiny | {k.replace("__", "."): v for k, v in settings.items()})
    return config


def stop_after(num_steps):
    """A `should_stop` that says so after that many steps (it is first asked at step 0)."""
    calls = iter(range(num_steps))
    return lambda: next(calls, None) is None


def recomputed(text):
    """ε as the lines of Python in a statement print it."""
    lines = text.partition("```python\n")[2].partition("```")[0]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(lines, {})
    return float(output.getvalue())


def without_mu(plan):
    """The same plan, whose μ and own limit on attacks are not known: they take half a second."""
    plan.__dict__["mu"] = None
    return plan


def first_leaf(params):
    """A mask that is True at the first leaf alone."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([i == 0 for i in range(len(leaves))])


ORACLES = {
    "dp_sgd": bam.dp_sgd,
    "dp_sat": lambda loss_fn: bam.dp_sat(loss_fn, radius=0.1),
    "bam_sam": lambda loss_fn: bam.bam_sam(loss_fn, radius=0.1),
    "bam_sam_mixed": lambda loss_fn: bam.bam_sam(loss_fn, radius=0.1, mix=0.5),
    "bam_exact": lambda loss_fn: bam.bam_exact(loss_fn, penalty=0.1),
    "bam_sam_masked": lambda loss_fn: bam.bam_sam(loss_fn, 0.1, ascent_mask=first_leaf),
    "bam_exact_masked": lambda loss_fn: bam.bam_exact(loss_fn, 0.1, ascent_mask=first_leaf),
}


def nothing(*given, **options):
    """A part of a config that forgets to return."""


class ThreeLogits(nn.Module):
    """A network that does not ask how many classes there are."""

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(3)(inputs.reshape(len(inputs), -1))


def own_network(num_classes, kind, **options):
    """A pair of functions: one linear layer, in a way that a release cannot always hold."""
    dtypes = {"bfloat16": jnp.bfloat16, "integer": jnp.int32}

    def init(key, inputs):
        kernel = jnp.zeros((inputs[0].size, num_classes), dtypes.get(kind, jnp.float32))
        return [kernel] if kind == "list" else {"kernel": kernel}

    def apply(params, inputs):
        logits = inputs.reshape(len(inputs), -1) @ jax.tree.leaves(params)[0]
        return (logits, 0) if kind == "two outputs" else logits

    return init, apply


def three_logits(num_classes, **options):
    return ThreeLogits()


def broken(*given, **options):
    """A part of a config whose code is wrong."""
    return len(3)


def given_dataset(**options):
    """Digits that are called as what was asked for."""
    return datasets.load("digits")._replace(name=str(options))


def given_features(mirror=True, groups=2, **options):
    """A map that is told whether it mirrors, and divides by what it is told."""
    return lambda images: images[:, :, ::-1] if mirror else images / (groups + 1)


def forget_data():
    """Removes the data sets that are kept in memory."""
    loading.kept_datasets.clear()


def digits_moved_by(path):
    """Digits whose labels are moved on by the number in a file."""
    digits, by = datasets.load("digits"), int(Path(path).read_text())
    train = digits.train._replace(labels=(digits.train.labels + by) % 10)
    return digits._replace(name="moved", train=train)


def digits_of_numbers(path):
    """Digits as numbers, of which none, some or all are missing."""
    digits = datasets.load("digits")
    train, test = (x._replace(images=x.images.astype(np.float32)) for x in digits[1:3])
    for split in (train, test):
        split.images[: {"none": 0, "some": 20, "all": None}[path]] = np.nan
    return digits._replace(train=train, test=test, mean=digits.mean * 255, std=digits.std * 255)


# What every transform must bound, whatever it is given.
ADVERSARIAL = {
    "zero": [0.0, 0.0, 0.0],
    "small": [0.1, 0.2, 0.2],
    "on the bound": [0.6, 0.0, 0.8],
    "large": [3.0, -4.0, 12.0],
    "huge": [1e30, -1e30, 1e30],
    "largest float32": [3.4e38, 3.4e38, 3.4e38],
    "square just fits": [1e19, 1e19, 0.0],
    "squares underflow": [1e-25, 1e-25, 0.0],
    "denormal": [1e-40, 1e-40, 1e-40],
    "mixed scales": [1e15, 1e-15, 1.0],
    "nan": [np.nan, 1.0, 1.0],
    "inf": [np.inf, 1.0, 1.0],
    "inf and -inf": [np.inf, -np.inf, 1.0],
    "all nan": [np.nan, np.nan, np.nan],
}


def mlp_loss(params, example):
    """A tanh network of 3 inputs, 4 hidden units and one output, with squared error."""
    x, y = example
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return 0.5 * (hidden @ params["w2"] - y) ** 2


def quadratic(w, x):
    """0.5 ‖w − x‖², whose gradient is w − x and whose Hessian is the identity."""
    return 0.5 * jnp.sum((w - x) ** 2)


def mlp_params(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"w1": (3, 4), "b1": (4,), "w2": (4,)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def mlp_batch(num_rows, dtype=np.float32):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(num_rows, 3)), 2.0 * rng.normal(size=num_rows)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def mostly(values, slow):
    """For `parametrize`: some of the values only in the slow suite."""
    return [_marked(x, pytest.mark.slow) if x in slow else x for x in values]


def thoroughly(values, *always):
    """For `parametrize`: values of which some alone are in `make test`."""
    return [x if x in always else _marked(x, pytest.mark.thorough) for x in values]


def _marked(value, mark):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)


def refused(message, function, *arguments, kind=ValueError, **options):
    """Fails unless `function` raises this kind of error, in one line that matches."""
    with pytest.raises(kind, match=message) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)


def row(batch, i):
    return jax.tree.map(lambda x: x[i], batch)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=rtol, atol=atol)


def norm64(tree):
    """L2 norm in float64, by NumPy: the judge of what JAX computed in float32."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves))) if leaves else 0.0


def distance(a, b):
    return norm64(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y), a, b))


def derivatives(fn, *arguments):
    """A scalar function's value, slope, gradient and two Hessian-vector products: of every kind."""
    directions = jax.tree.map(jnp.sin, arguments)
    positions = tuple(range(len(arguments)))
    gradient = jax.grad(fn, positions)
    return (
        fn(*arguments),
        jax.jvp(fn, arguments, directions)[1],
        gradient(*arguments),
        jax.linearize(gradient, *arguments)[1](*directions),
        jax.grad(lambda *a: pytree.l2_norm(gradient(*a)), positions)(*arguments),
        jax.vmap(gradient)(*jax.tree.map(lambda x: jnp.stack([x, jnp.cos(x)]), arguments)),
    )


def encode(image, form="PNG", mode=None):
    """An image as a file has it."""
    file = io.BytesIO()
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    (picture.convert(mode) if mode else picture).save(file, form)
    return file.getvalue()


def write_parquet(file, images, labels, image="image", label="label", names=None, **columns):
    """Images, or what stands in their place, labels and more columns, as Hugging Face has them."""
    encoded = [encode(x) if isinstance(x, np.ndarray) else x for x in images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = pa.array([{"bytes": x, "path": None} for x in encoded], kind)
    numbers = labels if isinstance(labels, pa.Array) else pa.array([*labels], pa.int64())
    table = pa.table({image: structs, label: numbers, **columns})
    if names is not None:
        features = {label: {"names": names, "_type": "ClassLabel"}}
        facts = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(facts)
    pq.write_table(table, file, row_group_size=5)


def made_once(tmp_path_factory, name, make):
    """The folder that `make(folder)` filled, once for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            make(folder)
    return folder


@contextlib.contextmanager
def heard(*numbers):
    """Signals are not ignored, which `nohup` and a shell's background jobs hand on to children."""
    default = {signal.SIGINT: signal.default_int_handler}
    before = {x: signal.signal(x, default.get(x, signal.SIG_DFL)) for x in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(*arguments, **options):
    """`bam` in a process of its own: a signal reaches it as it would from a terminal."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with heard(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return subprocess.Popen([sys.executable, "-m", "bam", *arguments], **pipes, **options)


class Command:
    """`python -m …` as a user runs it, in a fork of a process that has imported the libraries.

    Importing them is most of what a short command does. A context manager: what still runs at its
    end is killed.
    """

    def __init__(self, *arguments, **environ):
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["bam.training.loop", "bam.sweep.plot"])
        self.arguments = arguments
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for path in self.outputs:
            path.touch()
        environ = dict(os.environ) | environ
        self.process = server.Process(target=_be_command, args=(arguments, environ, self.outputs))
        self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.kill()
        self.process.join()
        self.folder.cleanup()

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def check_runs(self):
        """Fails, with what the command said, if it has ended."""
        assert self.process.exitcode is None, self.outputs[1].read_text(encoding="utf-8")

    def wait(self, timeout=240):
        """Its `returncode`, `stdout` and `stderr`, once it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"{self.arguments} took more than {timeout} s")
        texts = [path.read_text(encoding="utf-8") for path in self.outputs]
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *texts)


def run_command(*arguments, timeout=240):
    """Runs a command.

    A command of `bam` runs in this process, as a function. A script runs in a process of its own.
    """
    if arguments[0] != "bam":
        with Command(*arguments) as command:
            return command.wait(timeout)
    outputs = [io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2)]
    with (
        contextlib.redirect_stdout(outputs[0]),
        contextlib.redirect_stderr(outputs[1]),
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        # A process of its own would not know the trainings of earlier tests, and their seeds.
        patch.setattr(privatize, "_claims", weakref.WeakValueDictionary())
        warnings.simplefilter("default")  # and as Python itself has it:
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        shown = (
            set()
        )  # once each: the tests' type checks change filters, which forgets what was shown

        def show(message, category, filename, lineno, *more, **options):
            text = warnings.formatwarning(message, category, filename, lineno)
            if text not in shown:
                sys.stderr.write(text)
            shown.add(text)

        warnings.showwarning = show
        status = main.main(arguments[1:])
    for output in outputs:
        output.flush()
    texts = [output.buffer.getvalue().decode() for output in outputs]
    return subprocess.CompletedProcess(arguments, status, *texts)


def _be_command(arguments, environ, outputs):
    os.environ.clear()
    os.environ.update(environ)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    if num_devices := environ.get("JAX_NUM_CPU_DEVICES"):  # JAX was imported before it was set
        jax.config.update("jax_num_cpu_devices", int(num_devices))
    sys.argv = list(arguments)
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a fork's end leaves them out; `jax.distributed` needs them


def several_devices(number):
    """Returns the first devices.

    On accelerators with fewer devices it skips the test.
    """
    if jax.device_count() < number and jax.default_backend() != "cpu":
        pytest.skip(f"needs {number} devices, and here is one {jax.devices()[0].device_kind}")
    return jax.devices()[:number]


def compilations(fn, *args):
    """What JAX compiles, or reads compiled from disk, while `fn` runs."""
    count = 0

    def listen(event, *_, **__):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn(*args)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count


@functools.cache
def mesh_of(num_devices):
    """A mesh of the first devices, over which rows are split."""
    devices = several_devices(num_devices)
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_devices,), ("data",), axis_types=auto, devices=devices)


def resident(field):
    """VmRSS or VmHWM of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


@contextlib.contextmanager
def at_most(mib, traced=True):
    """Fails if Python and NumPy ask for more (`traced`), or if more becomes resident (on Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS") if sys.platform == "linux" else 0
    if traced:
        tracemalloc.start()
    try:
        yield
        asked = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert asked < mib, f"{asked:.0f} MiB were asked for"
    if sys.platform == "linux":
        grown = resident("VmHWM") - before
        assert grown < mib, f"{grown:.0f} MiB more became resident"


def grid(methods="dp_sgd", settings=(), holdout=0, smaller=1, fixed=(), **overrides):
    """A study of logistic regression on digits, of three steps: every method at every setting."""
    settings = comparison.settings_of(settings)
    overrides = {"model.name": "linear", "num_steps": 3, **overrides}
    return comparison.make_study(
        lambda method, names: method_config(
            digits.__file__, method, overrides, {"dataset.holdout", *fixed}, names
        ),
        methods.split(","), settings, holdout, smaller,
    )  # fmt: skip
