"""What a step would do on a GPU, counted on a machine without one.

``python -m tests.speed.gpu.counted`` prints a table for each precision. Steps run on tensors
without data, with the kernels of a GPU, at the sizes that people train. Their operators are
counted: launches, bytes that are read and written, flops of products by dtype, and the peak of
memory. Times are not guessed. Operators are those of the CPU otherwise. Autocast computes those
functions in float32 that it does on a GPU.
"""

from __future__ import annotations

import argparse
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autogram import Engine, _arguments, _weights
from autogram._blocks import Devices
from autogram._blocks.kernels import cuda
from autogram._capture.samples.call import CallLayouts
from tests.speed.report import as_table
from tests.speed.training import constant_weights
from tests.speed.workloads import Workload

from .autocast import autocast_as_on_a_gpu
from .models import TINY, WORKLOADS
from .steps import PRECISIONS, Precision, precision

# The memory and the processors of an H100.
_BYTES, _PROCESSORS = 80 * 2**30, 132

# They launch nothing: they make views or memory, or answer questions.
_SILENT = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "aten::set_", "prof")
_SILENT += ("aten::promote_types", "aten::_unsafe_view", "aten::lift", "prim::")

# They write their first argument, or make a tensor like it, and read none of its elements.
_WRITERS = ("aten::new_", "aten::copy_", "aten::fill_", "aten::zero_", "aten::zeros_like")
_WRITERS += ("aten::ones_like", "aten::full_like", "aten::_foreach_copy_")

# The flops of these are those of two matrices, whatever dtype the result has.
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm)

KINDS = ("SGD", "two passes", "fused")


@dataclass
class Counts(TorchDispatchMode):
    """Counts what the operators of a block do.

    Attributes:
        launches: How many of them do work.
        moved: How many bytes they read and write, each tensor once for each operator.
        flops: Twice the multiply-adds of products and convolutions, by the dtype of the operands.
        taken: The bytes of tensors that are alive.
        peak: The most bytes that were.
    """

    launches: int = 0
    moved: int = 0
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    taken: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: set[int] = set()

    def restart(self) -> None:
        """Begins to count anew, with what is alive now."""
        self.launches = self.moved = 0
        self.flops.clear()
        self.peak = self.taken

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for x in results:
            self._hold(x.untyped_storage())
        if function.is_view or function.name().startswith(_SILENT):
            return result
        given = args[function.name().startswith(_WRITERS) :]
        given += tuple(x for name, x in kwargs.items() if name != "out")
        operands = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        read = {(x.untyped_storage()._cdata, x.storage_offset()): _bytes(x) for x in operands}
        self.launches += 1
        self.moved += sum(read.values()) + sum(map(_bytes, results))
        if (flops := flop_registry.get(function._overloadpacket)) is not None:
            known = (args[:2], {}) if function._overloadpacket in _PRODUCTS else (args, kwargs)
            found = flops(*known[0], **known[1], out_val=result)
            self.flops[operands[0].dtype] += found // _groups(function, args)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Counts the bytes of a storage until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def free() -> None:
            self._alive.discard(key)
            self.taken -= size

        self._alive.add(key)
        self.taken += size
        self.peak = max(self.peak, self.taken)
        weakref.finalize(storage, free)


def _bytes(tensor: Tensor) -> int:
    """How many bytes of memory a tensor shows, each once."""
    steps = [(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return min(tensor.numel(), 1 + sum(steps)) * tensor.element_size()


def _groups(function: Any, args: Sequence[Any]) -> int:
    """The groups of a convolution's gradient, whose flops PyTorch counts as those of one group."""
    return args[9] if function._overloadpacket is torch.ops.aten.convolution_backward else 1


_begin = CallLayouts.begin


def _begin_apart(self: CallLayouts) -> None:
    """Infers samples by integers that have values, and that no GPU would see."""
    with _disable_current_modes():
        _begin(self)


@contextmanager
def without_data(counts: Counts) -> Iterator[FakeTensorMode]:
    """Lets tensors without data be on a GPU, for all that engines see."""
    with ExitStack() as stack:
        for owner, name, value in (
            (Devices, "on", lambda devices, _device: devices.cuda),
            (cuda, "_can_accumulate", lambda *_: True),
            (cuda, "_processors", lambda _device: _PROCESSORS),
            (cuda, "_bytes", lambda _device: (_BYTES - counts.taken, counts.taken)),
            (_arguments, "check_values", lambda _losses: None),
            (_weights, "check_numbers", lambda _weights: None),
            (_weights, "check_finite", lambda *_: None),
            (CallLayouts, "begin", _begin_apart),
            (config, "fake_tensor_cache_enabled", False),  # the cache keeps storages alive
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(autocast_as_on_a_gpu())
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(counts)
        yield mode


def _emptied(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model without data, with the ties that it had."""
    found: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in found:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                found[parameter] = nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = found[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)
    return model


def count(workload: Workload, kind: str, how: Precision, *, steps: int = 3) -> Counts:
    """What the last of some steps does, with an optimizer that launches once."""
    model, counts = workload.make_model(), Counts()
    with without_data(counts) as mode:
        model = _emptied(model, mode)
        inputs, targets = workload.make_batch(workload.batch_size)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, foreach=True)
        backward: Callable[[Tensor], object] = lambda losses: losses.mean().backward()  # noqa: E731
        if kind != "SGD":
            engine = Engine(model, batch_dim=0, verify="never")
            backward = {
                "two passes": lambda losses: losses.backward(
                    constant_weights(engine.compute_gramian(losses))
                ),
                "fused": lambda losses: engine.backward(losses, constant_weights),
            }[kind]
        for _ in range(steps):
            counts.restart()
            optimizer.zero_grad()
            with precision(how, "cpu"):
                backward(workload.compute_losses(model(inputs), targets))
            optimizer.step()
    return counts


def row(workload: Workload, how: Precision) -> list[str]:
    """A line of the table: what SGD's step does, and the two other steps beside it."""
    sgd, *others = (count(workload, kind, how) for kind in KINDS)
    wide = [100 * x.flops[torch.float32] / max(1, x.flops.total()) for x in (sgd, *others)]
    return [
        workload.description,
        " / ".join(str(x.launches) for x in (sgd, *others)),
        " / ".join([f"{sgd.moved / 1e9:.1f} GB", *[f"{x.moved / sgd.moved:.2f}" for x in others]]),
        " / ".join(
            [
                f"{sgd.flops.total() / 1e12:.2g} T",
                *[f"{x.flops.total() / sgd.flops.total():.2f}" for x in others],
            ]
        ),
        " / ".join(f"{x:.0f} %" for x in wide),
        " / ".join([f"{sgd.peak / 1e9:.2f} GB", *[f"{x.peak / sgd.peak:.2f}" for x in others]]),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, and print a table for each precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = {**WORKLOADS, **{f"tiny-{name}": x for name, x in TINY.items()}}
    parser.add_argument("--model", nargs="*", choices=known, default=list(WORKLOADS))
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, default=PRECISIONS[1:])
    options = parser.parse_args(arguments)
    for how in options.precision:
        print(f"{how}, SGD / two passes / fused:\n")
        header = ["model", "launches", "bytes moved", "flops", "of them in float32", "peak"]
        print(as_table([header, ["---"] + ["---:"] * 5]))
        for name in options.model:
            print(as_table([row(known[name], how)]), flush=True)
        print()


if __name__ == "__main__":
    main()
