"""ε before, during and after a run: the plan, the run that keeps to it, and the statement.

Of bam's folders it imports `core` alone. dp-accounting does the sums; only random allocation needs
an extra.
"""
