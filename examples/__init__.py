"""What a Jacobian is good for: one script for each use, run as `python -m examples.NAME`."""
