"""What Jacobian products are good for, in pictures, and what is not won: ``make demo``."""
