"""Worked extensions and uses of `bam` in other people's pipelines; each file stands alone."""
