"""The backward side: one pass past the taps, which turns cotangents into columns of J."""
