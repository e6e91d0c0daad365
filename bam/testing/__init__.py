"""A conformance kit for your own transforms and oracles: call it from pytest.

`check_transform` and `check_oracle` raise an `AssertionError` that names the fault. They try
gradients and examples that broke real code, so passing them does not prove that there is no fault.

    bam.testing.check_transform(bam.clip_by_l2_norm(1.0))
    bam.testing.check_oracle(lambda loss_fn: bam.bam_sam(loss_fn, 0.1))
"""

from bam.testing.oracles import check_oracle
from bam.testing.transforms import check_transform

__all__ = ["check_oracle", "check_transform"]
