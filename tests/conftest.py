"""Shapes and types of every annotated function in `bam` are checked while the tests run.

Eight CPU devices exist, for the tests of several; all other tests see one.
"""

import jax
import jaxtyping
import pytest

import tests.typecheck  # noqa: F401 (the hook looks it up by name)

# Stays installed for the whole test run; it must come before the first import of bam.
_hook = jaxtyping.install_import_hook("bam", "tests.typecheck.check")

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="session")
def one_device():
    from bam import devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "visible", lambda: jax.devices()[:1])
        yield
