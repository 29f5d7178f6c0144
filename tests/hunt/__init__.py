"""Hunts for mistakes, run by hand: what they find becomes tests and tables."""
