"""The code of "Add parts of your own" runs as it is printed there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"```python\n(# (\w+\.py)\n.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL
)
BOUND = "bam.chain(optax.stateless(normalise), bam.clip_by_l2_norm(clip_norm))"
UNBOUNDED = (
    "bam.BoundedTransformation(*optax.stateless(normalise), "
    "sensitivity=bam.clip_by_l2_norm(clip_norm).sensitivity)"
)


@pytest.mark.parametrize("is_bounded", [True, False])
def test_the_page_s_parts_pass_its_tests_and_a_clip_without_its_bound_fails(tmp_path, is_bounded):
    for text, name in BLOCKS:
        changed = text if is_bounded else text.replace(BOUND, UNBOUNDED)
        (tmp_path / name).write_text(changed)
    assert {"my_clip.py", "my_method.py", "test_mine.py"} <= {name for _, name in BLOCKS}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ("2 passed" if is_bounded else "is not finite") in done.stdout, done.stdout
    assert (done.returncode == 0) == is_bounded
