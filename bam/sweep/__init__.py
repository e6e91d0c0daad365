"""Groups of runs: each run trained once, compared seed by seed, and plotted.

Imports `bam.training` and the packages below it. `bam.cli.sweep` is the command.
"""
