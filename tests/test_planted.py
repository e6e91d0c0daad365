"""The list of planted faults fits the tree.

`python -m tests.planted` plants them.
"""

from pathlib import Path

import pytest

from tests.planted.faults import FAULTS


def test_every_fault_applies_to_the_tree_as_it_is():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 30
    for fault in FAULTS:
        text = Path(fault.file).read_text()
        assert text != fault.planted(text)
        if fault.file.endswith(".py"):
            compile(fault.planted(text), fault.file, "exec")
        assert fault.tests and all(Path(test).is_file() for test in fault.tests)


@pytest.mark.parametrize(("times", "old"), [(0, "no such text"), (2, "gradient")])
def test_a_fault_that_does_not_apply_is_refused(times, old):
    fault = FAULTS[0]._replace(old=old)
    with pytest.raises(
        ValueError, match=rf"noise_halved: its old text stands {times} times in bam/"
    ):
        fault.planted("gradient of a gradient")
