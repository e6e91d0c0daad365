"""Worked extensions, and uses of `bam` with other libraries; each file stands alone."""
