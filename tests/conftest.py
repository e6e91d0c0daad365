"""Shapes and types of every annotated function in `bam` are checked while the tests run."""

import jaxtyping

import tests.typecheck  # noqa: F401 (the hook looks it up by name)

# Stays installed for the whole test run; it must come before the first import of bam.
_hook = jaxtyping.install_import_hook("bam", "tests.typecheck.check")
