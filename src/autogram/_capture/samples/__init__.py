"""Samples: where the samples of the losses are in the results of torch calls."""
