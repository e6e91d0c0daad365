"""The commands that a user runs: their flags and their printing.

It imports any other folder but `testing`. Nothing of `bam` imports it; scripts take from it what
their command lines need.
"""
