"""Infers from autograd's graph which sample each place of a cotangent belongs to."""
