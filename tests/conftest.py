"""Shapes and types of every annotated function in `bam` are checked while the tests run."""

import jaxtyping

# Stays installed for the whole test run; it must come before the first import of bam.
_hook = jaxtyping.install_import_hook("bam", "tests.typecheck.check")
