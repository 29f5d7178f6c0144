"""The backward side: one pass past the taps, whose cotangents become columns of J."""
