"""The commands that a user runs, and what they share.

It imports any other folder but `testing`; nothing imports it but `scripts/`.
"""

import sys

from bam import extras

sys.excepthook = extras.one_line
with extras.needs("train"):  # by nearly every command; modules of bam ask for what else there is
    import ml_collections  # noqa: F401
    import rich  # noqa: F401
