"""A hunt for silent errors: operators in series of steps in which their arguments change.

``make hunt`` runs all of it; ``tests/unit/test_hunt.py`` runs a fixed part.
"""
