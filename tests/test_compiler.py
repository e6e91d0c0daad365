"""What XLA's CPU compiler gets wrong is right for users, who do not have these tests' flags."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from bam import compiler

ROOT = Path(__file__).parents[1]
LIBRARY = compiler._LIBRARY

# Each prints its largest relative error. The last is a gradient's norm, by `core/pytree.py`.
SUMS = """
import json, numpy as np
import jax, jax.numpy as jnp

def error(actual, expected):
    return float(np.nan_to_num(np.max(np.abs(actual - expected) / expected), nan=np.inf))

rng = np.random.default_rng(0)
m, x = rng.normal(size=(3, 3)).astype("f"), rng.normal(size=(40001, 3)).astype("f")
e = np.abs(rng.normal(size=(33, 16, 16))).astype("f")
squares = np.sum((x.astype("d") @ m.T.astype("d")) ** 2, axis=1)
errors = {}
errors["square"] = error(jax.jit(jax.vmap(lambda r: jnp.sum((m @ r) ** 2)))(x), squares)
constant = jax.jit(lambda e, c: jnp.sum((e @ jnp.full((16, 16), c)) ** 2, axis=-1))
errors["constant"] = error(constant(e, 0.5), 16 * (e.sum(2, dtype="d") / 2) ** 2)
grad = jax.grad(lambda w, r: w @ (m @ r))
norm = jax.jit(jax.vmap(lambda r: jnp.sqrt(jnp.sum(jnp.square(grad(jnp.zeros(3), r))))))
errors["norm"] = error(norm(x), np.sqrt(squares))
print(json.dumps(errors))
"""


def start(code, **environ):
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | environ
    environ["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


def test_known_wrong_sums_are_right_once_bam_is_imported_and_a_late_import_warns():
    """The control is the same without `bam`: wrong where this CPU meets the fault.

    Where it does not, the control says nothing, and only what `bam` does is tested.
    """
    without = start(SUMS + "import bam\n")
    early = start("import jax, bam\n" + SUMS)
    printed, warned = without.communicate()
    control = json.loads(printed)
    printed, nothing = early.communicate()
    right = json.loads(printed)

    assert max(right.values()) < 1e-5, right
    assert "computes wrong sums" not in nothing
    known = jaxlib.__version__ in compiler.FAULTY
    assert known or max(control.values()) < 1e-5, control
    assert (
        warned.count("computes wrong sums on CPU, and JAX has started: import bam first") == known
    )


FLAG, GUARD = compiler.FLAG, f"{compiler.FLAG}={compiler.GUARD}"
FTZ = "--xla_cpu_ftz=true"
RIGHT = ["0.8.0", "0.9.2", "0.10.0", "0.10.1"]
UNCHECKED = ["0.10.2.dev20260601", "0.11.3", "0.12.0.2", "0.13.0", "1.0"]


def guarded(version, before=None, started=None, library=LIBRARY):
    """`XLA_FLAGS` as the guard leaves it, and what it warns of."""
    environ = {} if before is None else {"XLA_FLAGS": before}
    warned = compiler.guard(version, environ, lambda: started, library)
    return environ.get("XLA_FLAGS"), warned


@pytest.mark.parametrize("version", compiler.FAULTY)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, GUARD),
        ("", GUARD),
        (FTZ, f"{GUARD} {FTZ}"),
        # What JAX users copy from each other: XLA stops reading at a word without dashes.
        (f"{FTZ} threads=1", f"{GUARD} {FTZ} threads=1"),
        (f"{FTZ} threads=1 {GUARD}", f"{GUARD} {FTZ} threads=1 {GUARD}"),
        (f"{GUARD} threads=1", ...),
        (f"{FLAG}=", ...),
        (f"{FLAG}=-reduce", ...),
        (f"{FLAG}=reduce {FLAG}=INDIVIDUAL_DOT", ...),
    ],
)
def test_the_flag_is_added_to_the_users_own_and_replaces_none(version, before, after):
    assert guarded(version, before) == (before if after is ... else after, "")


@pytest.mark.parametrize("choice", ["reduce", "dot", "dot,eltwise", "+eltwise"])
def test_a_users_own_wrong_choice_stays_and_is_warned_of(choice):
    for before in (f"{FLAG}={choice}", f"{FLAG}={choice} threads=1 {GUARD}"):
        after, warned = guarded("0.10.2", before)
        assert after == before and f"with {FLAG}={choice}: use individual_dot" in warned


def test_once_jax_has_started_nothing_is_set_and_the_cpu_is_warned_of():
    after, warned = guarded("0.10.2", started="cpu")
    assert after is None and "import bam first" in warned
    assert guarded("0.10.2", started="gpu") == (None, "")


def test_a_file_of_flags_is_read_and_left_alone(tmp_path):
    path = tmp_path / "flags"
    path.write_text(f"{FTZ}\n")
    after, warned = guarded("0.10.2", str(path))
    assert after == str(path) and f"add {GUARD} to {path}" in warned
    path.write_text(f"{FTZ}\n{GUARD}\n")
    assert guarded("0.10.2", str(path)) == (str(path), "")


@pytest.mark.parametrize("version", RIGHT)
def test_a_right_compiler_which_may_not_know_the_flag_is_not_given_it(version):
    assert guarded(version) == (None, "")


@pytest.mark.parametrize("version", UNCHECKED)
def test_a_compiler_that_was_not_checked_is_given_the_flag_only_if_it_knows_it(
    version, tmp_path, caplog
):
    if compiler.knows_flag(LIBRARY):
        assert guarded(version) == (GUARD, "") and not caplog.records
        assert "use individual_dot" in guarded(version, f"{FLAG}=reduce")[1]
    library = tmp_path / "library"  # at first there is none
    for known in ("", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", FLAG):
        assert guarded(version, library=library) == (None, "")
        assert f"has not been checked with jaxlib {version}" in caplog.text
        caplog.clear()
        library.write_bytes(b"\0ELF" + known.encode())
    assert guarded(version, library=library) == (None, "") and caplog.records


@pytest.mark.parametrize("knows", [True, False])
def test_no_unchecked_compiler_ends_an_import_where_warnings_are_errors(knows):
    """With a compiler that knows the flag the sums are right, too, as those of a checked one."""
    hide = "" if knows else "import pathlib; pathlib.Path.is_file = lambda self: False\n"
    code = f"import warnings, jaxlib; jaxlib.__version__ = '0.99.0'\n{hide}"
    code += "warnings.simplefilter('error', RuntimeWarning); import bam\n"
    printed, log = (process := start(code + SUMS)).communicate()
    assert process.returncode == 0, log
    assert ("has not been checked with jaxlib 0.99.0" in log) == (not knows)
    if knows and compiler.knows_flag(LIBRARY):
        assert max(json.loads(printed).values()) < 1e-5, printed


def test_the_pinned_compiler_was_checked():
    pinned = dict(re.findall(r"(?m)^(jax|jaxlib)==(\S+)$", (ROOT / "constraints.txt").read_text()))
    assert pinned["jax"] == pinned["jaxlib"]
    assert guarded(pinned["jaxlib"])[1] == ""


@pytest.mark.slow
def test_fuzzed_sums_agree_with_numpy_in_float64():
    """Norms, products before sums, GroupNorm and whole clipped sums, as `tests.compiler_fuzz` says.

    The control runs products with the default flag, given by name: it finds what is known.
    """
    run = "from tests import compiler_fuzz as fuzz; fuzz.main({})"
    found, errors = start(run.format("")).communicate()
    assert json.loads(found)["wrong"] == {}, errors
    assert json.loads(found)["checks"] > 300
    if jaxlib.__version__ in compiler.FAULTY:
        products = run.format("[fuzz.products_before_sums]")
        found, errors = start(products, XLA_FLAGS=f"{FLAG}=+reduce").communicate()
        assert "computes wrong sums on CPU with" in errors
        wrong = json.loads(found)["wrong"]
        assert not wrong or any("gradients of 3 from 3" in name for name in wrong), wrong
