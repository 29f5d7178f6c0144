"""How each kind of node of autograd's graph moves the samples of its results."""
