"""Operators that would make a GPU and the host wait for each other."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# They read values on the host, have shapes that follow from values, or copy between devices.
WAITING = {
    *("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"),
    *("aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::unique_dim"),
    *("aten::_unique", "aten::_unique2", "aten::bincount", "aten::repeat_interleave.Tensor"),
    *("aten::tolist", "aten::_linalg_check_errors", "aten::isin.Tensor_Tensor"),
}


class Waits(TorchDispatchMode):
    """Lists the operators of a block that wait, in order.

    On a CPU, ``aten::index`` by booleans and copies from the host cannot be told from what does
    not wait, so that they are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if function.name() in WAITING:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))
