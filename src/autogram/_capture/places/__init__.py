"""Which sample each place of a cotangent belongs to, inferred from autograd's graph."""
