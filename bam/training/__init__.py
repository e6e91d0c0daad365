"""From a config to a trained model: its parts, the trainer, the step, the loop, a run's files.

It imports `core`, `privacy`, `data`, `models` and `features`.
"""
