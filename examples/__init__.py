"""Uses of Jacobians: one script for each, run as `python -m examples.NAME`."""
