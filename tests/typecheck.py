"""The run-time type checker that `conftest.py` puts around `bam`."""

import beartype

# An int is welcome where a float is asked for, as everywhere in Python.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
