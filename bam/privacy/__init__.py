"""Privacy accounting: ε before, during and after a run, and the plan that fixes it.

It imports `core` alone, for what draws a batch, and needs no extra: dp-accounting does the sums.
"""
