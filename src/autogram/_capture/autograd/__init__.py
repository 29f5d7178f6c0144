"""Autograd: passes through its graph, walks of the graph, and products through a part of it."""
