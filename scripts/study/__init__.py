"""Studies whose results are kept and whose code is not."""
