"""Tracked tensors: what is known of a tensor that is computed from parameters alone."""

import torch

from autogram._capture.tracked import track_derived, track_parameter


def test_cast_to_another_device_is_no_region_of_a_parameter() -> None:
    """Its rows are on that device, and are brought to the parameter's."""
    parameter = torch.zeros(3, requires_grad=True, device="cpu")
    whole = track_parameter(parameter)
    for dtype, device, has_region in (
        (torch.float16, "cpu", True),
        (torch.float16, "meta", False),
        (parameter.dtype, "meta", False),
    ):
        derived = parameter.to(device, dtype)
        found = track_derived(derived, [whole], None, is_cast=True)
        assert (found.region is not None) == has_region
        assert found.device == derived.device
