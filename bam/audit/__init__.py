"""Attacks and tests that try to refute a run's privacy claim.

`canary` bounds ε from many short runs, `whole_run` tests noise and batches of real runs, `one_run`
bounds ε from one training on a user's own data. May import every folder but `testing` and `cli`.
"""
