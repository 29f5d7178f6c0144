"""The transfer of each kind of node: all known facts about how nodes move samples."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from autogram._capture.autograd.graph import kind_of_node, use_of
from autogram._capture.autograd.slices import is_pointwise
from autogram._capture.places.transfers.indexing import OF_INDICES
from autogram._capture.places.transfers.layers import ELEMENTWISE, FAMILIES_OF_LAYERS, OF_LAYERS
from autogram._capture.places.transfers.products import FAMILIES_OF_PRODUCTS, OF_PRODUCTS
from autogram._capture.places.transfers.step import Transfer, by_element
from autogram._capture.places.transfers.views import OF_VIEWS, PIECES

_TABLE = {**OF_VIEWS, **OF_INDICES, **OF_PRODUCTS, **OF_LAYERS}
_FAMILIES = (*FAMILIES_OF_PRODUCTS, *FAMILIES_OF_LAYERS)


def transfer_of(node: Any) -> Transfer | None:
    """The transfer of a node, if its kind is known. Taps pass on what they receive."""
    if use_of(node) is not None:
        return by_element
    return _find(kind_of_node(type(node)).operation)


def is_elementwise(node: Any) -> bool:
    """Whether a node gives inputs of its result's shape multiples of the cotangent in its place."""
    return transfer_of(node) in ELEMENTWISE


def joins_pieces(node: Any) -> bool:
    """Whether the results of a node are pieces of its input: see :func:`.views.from_pieces`."""
    return kind_of_node(type(node)).operation in PIECES


@lru_cache(maxsize=4096)
def _find(operation: str) -> Transfer | None:
    """The transfer from the table, from PyTorch's tags, or from a family of names."""
    if operation in _TABLE:
        return _TABLE[operation]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation)
    if is_pointwise(name.lower()) or is_pointwise(operation.lower()):  # `log1p` is spelt like this
        return by_element
    differentiated = operation.removesuffix("Backward")
    if differentiated != operation and _find(differentiated) is by_element:
        return by_element  # it is element-wise like the function
    families = (transfer for family, transfer in _FAMILIES if family.fullmatch(operation))
    return next(families, None)
