"""Privacy accounting: ε before, during and after a run."""
