"""Samples: where the samples of the losses lie in the results of torch calls."""
