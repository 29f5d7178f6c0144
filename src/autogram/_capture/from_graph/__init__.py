"""Uses that are read from autograd's graph, where a forward pass is left alone."""
