"""Shapes and types of every annotated function in `bam` are checked while the tests run.

Eight CPU devices exist, for the tests of several; all other tests see one. What one test compiled,
others and the commands they start need not compile again: all share a cache, made for this run.
LLVM's optimisations and the emitters that prepare for them, most of the suite's time, are off;
XLA's passes are not. Set `XLA_FLAGS=`, as in `XLA_FLAGS= make test`, to test the code as users
compile it: that takes three times as long.
"""

import gc
import os
import platform
from importlib.metadata import version

os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    # The plain emitters leave it to LLVM which products and sums it makes one instruction, and so
    # to what stands beside them. AVX has no such instructions: equal programs give equal bits.
    + (platform.machine() == "x86_64") * " --xla_cpu_max_isa=AVX"
    # From 0.11 on there is one kind of emitters, and an unknown flag would end the process.
    + ([int(x) for x in version("jaxlib").split(".")[:2]] < [0, 11])
    * " --xla_cpu_use_fusion_emitters=false",
)

import jax
import jaxtyping
import pytest

import tests.typecheck  # noqa: F401 (the hook looks it up by name)

# Stays installed for the whole test run; it must come before the first import of bam.
_hook = jaxtyping.install_import_hook("bam", "tests.typecheck.check")

jax.config.update("jax_num_cpu_devices", 8)
gc.set_threshold(100_000, 50, 100)  # traces make millions of objects that live: 8 % of the time


# Whole files that `make test` leaves out: matrices of switches, inputs and settings, examples,
# imports, releases, predictions, installing, memory, audits, noise over bands and what trains
# several runs. The guarantee has its tests elsewhere, too.
THOROUGH = (
    *("audit", "augment", "backbones", "call_contexts", "compiler", "configs", "conformance_kit"),
    *("data_import", "diagnostics", "examples", "export", "features", "hardware", "importing"),
    *("install", "interpreter", "losses", "memory", "messy_folders", "metrics", "normalisation"),
    *("one_run", "packed", "parts", "pixels", "predict", "pretrained", "prior", "private_search"),
    *("processes", "properties", "random_allocation", "recognition", "report", "schedules"),
    *("scripts", "several_runs", "signals", "strategy", "stream", "sweep", "symmetries", "timing"),
    *("tuning", "untrusted_files", "waits"),
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "pages":
            item.add_marker(pytest.mark.pages)
        elif item.path.stem.removeprefix("test_") in THOROUGH:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True, scope="session")
def shared_compilation_cache(tmp_path_factory, worker_id):
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "jax_cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_device():
    from bam.training import devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "visible", lambda: jax.devices()[:1])
        yield


@pytest.fixture
def without_the_tests_type_checks():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def monkeypatch(monkeypatch):
    """No program that was compiled before is used where a test replaces a function of bam."""
    from bam.core import program
    from bam.training import parts

    caches, replace, replaced = [program._program, parts._shared_network], monkeypatch.setattr, []

    def setattr_and_forget(target, *given, **options):
        replace(target, *given, **options)
        if str(getattr(target, "__name__", target)).startswith("bam."):
            replaced.append(target)
            for cache in caches:
                cache.cache_clear()

    monkeypatch.setattr = setattr_and_forget
    yield monkeypatch
    for cache in caches if replaced else ():
        cache.cache_clear()


@pytest.fixture
def blank(monkeypatch):
    """Features are zeros, because weights that are drawn need no training."""
    from bam.features import extraction

    computed = lambda data, feature_map, *unused: extraction.blank(data, feature_map)  # noqa: E731
    monkeypatch.setattr(extraction, "extract", computed)
