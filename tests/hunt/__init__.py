"""Hunts for silent errors, run by hand: what they find becomes tests and tables.

``make hunt`` runs operators in series of steps in which their arguments change, and
``tests/unit/project/test_hunt.py`` a fixed part.
``make batching`` compares batched backward passes.
"""
