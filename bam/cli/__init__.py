"""The commands that a user runs: their flags and their printing.

It imports any other folder but `testing`. No other folder of `bam` imports it; scripts import its
parsing of flags and its printing.
"""
