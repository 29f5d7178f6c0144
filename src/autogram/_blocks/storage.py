"""Tensors on regions of a parameter, put into its storage and taken from there; who owns memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autogram._blocks.region import Region, contiguous_strides


def put(parts: Sequence[tuple[Region, Tensor]], parameter: Region) -> Tensor:
    """Tensors on regions of a parameter, added up in its storage.

    Args:
        parts: Regions, and a tensor ``(n, *canonical region)`` for each.
        parameter: The whole of the parameter.

    Returns:
        ``(n, places)``, with the places of the storage from the first to the last of the parameter.
        It may share its memory with the only part.
    """
    first, last = parameter.bounds
    places = last - first + 1
    region, part = parts[0]
    n = len(part)
    if len(parts) == 1 and region == parameter.canonical and parameter.is_gapless:
        return part.reshape(n, places)
    flat = part.new_zeros(n, places)
    for region, part in parts:
        strides = (places, *region.canonical.strides)
        flat.as_strided((n, *region.canonical.shape), strides, region.offset - first).add_(part)
    return flat


def restore(flat: Tensor, parameter: Region) -> Tensor:
    """Tensors of a parameter's shape and strides, ``(n, *parameter)``, from its storage."""
    n, places = flat.shape
    return flat.contiguous().as_strided((n, *parameter.shape), (places, *parameter.strides))


def store(tensor: Tensor, parameter: Region) -> Tensor:
    """A tensor of a parameter's shape as it lies in the parameter's storage, ``(places,)``."""
    first, last = parameter.bounds
    flat = tensor.new_zeros(last - first + 1)
    flat.as_strided(parameter.shape, parameter.strides, 0).copy_(tensor)
    return flat


def take(flat: Tensor, region: Region, parameter: Region) -> Tensor:
    """The elements of a region, in canonical order, from a parameter's storage ``(places,)``."""
    found = region.canonical
    return flat.as_strided(found.shape, found.strides, found.offset - parameter.offset)


def strides_of_gradient(parameter: Region) -> tuple[int, ...]:
    """The strides that autograd gives a gradient: those of a parameter without gaps."""
    return parameter.strides if parameter.is_gapless else contiguous_strides(parameter.shape)


def own(results: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Results that were computed together, each with memory of its own, and none a view.

    Views share a counter of changes with all views of their base, cannot be detached in place, and
    are pickled with the whole of their storage.

    Args:
        results: New tensors, or views of new ones, several of which may be views of one.
        strides: Those that each result is to have.
    """
    taken: set[int] = set()
    return [_own(x, wanted, taken) for x, wanted in zip(results, strides, strict=True)]


def _own(result: Tensor, strides: tuple[int, ...], taken: set[int]) -> Tensor:
    """One of the results, in its own memory if nothing else is there, else copied."""
    if result.stride() != strides:
        return result.new_empty_strided(result.shape, strides).copy_(result)
    storage = result.untyped_storage()
    place = storage.data_ptr()
    if storage.nbytes() > result.nbytes or place in taken:
        return result.clone()
    taken.add(place)
    if result._base is None:
        return result
    return result.new_empty(0).set_(storage, 0, result.shape, strides)
