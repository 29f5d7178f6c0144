"""Which of the two captures the engines that are made from now on have."""

is_on = False
"""Whether uses are read from autograd's graph. If not, forward passes are recorded."""
