"""Uses of Jacobian products in pictures, and where they gain nothing: ``make demo``."""
