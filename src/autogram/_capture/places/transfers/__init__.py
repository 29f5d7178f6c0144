"""Where each kind of node of autograd's graph takes the samples of its results."""
