"""Proofs: what the places of samples depend on, beside the graph."""
