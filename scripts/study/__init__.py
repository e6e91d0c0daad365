"""A study of features of drawn images: its code, for the results of docs/results_prior.md."""
