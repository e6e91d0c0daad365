"""Commands that a user runs, each as `python -m scripts.NAME` from the root."""

import sys

from bam import extras

sys.excepthook = extras.one_line
with extras.needs("train"):  # by nearly every command; modules of bam ask for what else there is
    import ml_collections  # noqa: F401
    import rich  # noqa: F401
