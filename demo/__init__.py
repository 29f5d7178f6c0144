"""Handwritten digits, learned by plain SGD and by per-sample Jacobian descent: ``make demo``."""
