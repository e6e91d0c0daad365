"""ε before, during and after a run: the plan, the run that keeps to it, and the statement.

It imports `core` alone of bam's folders. dp-accounting does the sums; only random allocation needs
an extra.
"""
