"""Worked extensions, and uses of `bam` with other libraries.

Each file stands alone.
"""
