"""Checks the arguments of engines and Jacobians, and brings them into one form."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from itertools import permutations
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autogram._blocks import Keep
from autogram._capture.backward.driver import BatchDim
from autogram._capture.backward.unseen import Unseen
from autogram._capture.backward.verification import Verify
from autogram.errors import (
    CoupledObjectivesWarning,
    InvalidBatchDimError,
    InvalidLossesError,
    InvalidModulesError,
    InvalidOperandError,
    InvalidOptionError,
    UnsupportedError,
    warn_user,
)

Direction = Mapping[str, Tensor] | Iterable[Tensor]
Names = Mapping[Tensor, str]
Grouping = Callable[[str], str] | Sequence[Mapping[str, Any]]
"""A group for each name, or the groups of an optimizer."""


def check_modules(modules: tuple[nn.Module, ...]) -> None:
    """Refuses modules that cannot be hooked together."""
    if not modules:
        raise InvalidModulesError("No module was given. Pass the model: `Engine(model)`.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InvalidModulesError(
                f"A {type(module).__name__} was given where a module is needed. Pass modules as "
                "separate arguments: `Engine(encoder, head)`."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidModulesError(
                f"{type(module).__name__} is scripted, and cannot have hooks. Pass the "
                "module that it was scripted from, or a module that contains it."
            )
    for (i, outer), (j, inner) in permutations(enumerate(modules), 2):
        name = next((name for name, module in outer.named_modules() if module is inner), None)
        if name is not None:
            where = f"`{name}` in it" if name else "the same"
            raise InvalidModulesError(
                f"Module {j} ({type(inner).__name__}) is inside module {i} "
                f"({type(outer).__name__}): it is {where}. Pass only the outer module."
            )


def is_integer(value: object) -> bool:
    """Whether a value is an integer, of Python or NumPy. Booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number, of Python or NumPy. Booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def count_of(name: str, value: Any, hint: str = "") -> int:
    """The value of an option that must be a positive integer."""
    if not is_integer(value) or value < 1:
        raise InvalidOptionError(
            f"The option `{name}` is {value!r}. Pass a positive integer{hint}."
        )
    return int(value)


def not_negative(name: str, value: Any) -> float:
    """The value of an option that must be a number, zero or positive."""
    if not (is_number(value) and value >= 0):
        raise InvalidOptionError(
            f"The option `{name}` is {value!r}. Pass zero or a positive number."
        )
    return float(value)


def dim_of(batch_dim: Any) -> BatchDim:
    """The dimension that counts the samples, or another allowed value of the option."""
    if batch_dim is None or (isinstance(batch_dim, str) and batch_dim == "auto"):
        return None if batch_dim is None else "auto"
    if not is_integer(batch_dim):
        raise InvalidBatchDimError(
            f"`batch_dim` is {batch_dim!r}. Pass the dimension of the losses that counts the "
            'samples, `None` to treat the batch as one sample, or "auto".'
        )
    return int(batch_dim)


def check_options(verify: Verify, unseen: Unseen) -> None:
    """Refuses invalid values of an engine's options."""
    if not _is_among(verify, get_args(Verify)):
        raise InvalidOptionError(
            f'`verify` is {verify!r}. Pass "first" (new calls, and at least each 64th), '
            '"always" or "never".'
        )
    if not _is_among(unseen, get_args(Unseen)):
        raise InvalidOptionError(
            f'`unseen` is {unseen!r}. Pass "rows" to compute them, or "error" to refuse them.'
        )


def refuse_options(made: object, unknown: Iterable[str], known: Callable[..., None]) -> None:
    """Refuses options that a class does not know: its ``__init__`` does not name them."""
    parameters = signature(known).parameters.values()
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    names = [x.name for x in parameters if x.kind in kinds and x.name != "self"]
    for name in unknown:
        near = get_close_matches(name, names, 1)
        raise TypeError(
            f"`{type(made).__name__}` has no option `{name}`. "
            + (f"Did you mean `{near[0]}`? " if near else "")
            + f"Its options are {', '.join(f'`{x}`' for x in names)}."
        )


def check_keep(keep: Keep) -> None:
    """Refuses an unknown value of ``keep``."""
    if not _is_among(keep, get_args(Keep)):
        raise InvalidOptionError(f'`keep` is {keep!r}. Pass "auto", "factors" or "rows".')


def is_retained(retain_graph: object) -> bool:
    """Whether to keep the graph. Refuses anything but a boolean, such as a string."""
    if retain_graph not in (True, False, None):
        raise InvalidOptionError(
            f"`retain_graph` is {retain_graph!r}. Pass `True` to keep the graph, or `False`."
        )
    return bool(retain_graph)


def _is_among(value: object, choices: Sequence[str]) -> bool:
    """Whether a value is one of some texts. ``in`` alone would compare an array's elements."""
    return isinstance(value, str) and value in choices


def without_values(tensor: Tensor) -> str:
    """Describes a tensor that has a shape but no values; empty text for any other tensor."""
    if isinstance(tensor, FakeTensor):
        return "a fake tensor"
    return "on the device `meta`" if tensor.is_meta else ""


def check_values(losses: Tensor) -> None:
    """Refuses losses that have a shape but no values."""
    if not losses.numel():
        return
    is_in_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if place := without_values(losses) or ("inside a `FakeTensorMode`" if is_in_mode else ""):
        raise InvalidLossesError(
            f"The losses of shape {tuple(losses.shape)} are {place}, where tensors have no values. "
            "The engine needs values to find the samples. Compute the losses outside "
            "`FakeTensorMode`, with a model on a real device, such as `model.to_empty(device=...)` "
            "with its weights loaded."
        )


def check_losses(losses: Tensor, batch_dim: BatchDim, told: set[str]) -> None:
    """Refuses losses without a Jacobian, and warns of one number for a whole batch.

    ``told`` holds the warnings that the user has already received.
    """
    check_values(losses)
    if losses.dtype.itemsize == 1 and losses.is_floating_point():
        raise InvalidLossesError(
            f"The losses have dtype {losses.dtype}, in which PyTorch cannot add up gradients. "
            "Compute them in a wider dtype: call `.float()` on the output of the model."
        )
    if not losses.is_floating_point():
        raise InvalidLossesError(
            f"The losses have dtype {losses.dtype}. Objectives must be real floating-point "
            "numbers; for complex losses, take `.abs()` or `.real`."
        )
    if losses.is_nested or losses.layout != torch.strided:
        raise InvalidLossesError(
            f"The losses are a nested or sparse tensor (layout {losses.layout}). Pass a dense "
            "tensor: `torch.cat` for losses of different lengths, `.to_dense()` for sparse losses."
        )
    if torch._C._are_functorch_transforms_active():
        raise InvalidLossesError(
            "The engine is called inside a `torch.func` transform, which has its own graph. Call "
            "it outside, on losses that were computed outside."
        )
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled_autograd, "compiled_autograd_enabled", False):
        raise UnsupportedError(
            "The engine is called while compiled autograd is on, which traces backward passes "
            "instead of running them. Set `torch._dynamo.config.compiled_autograd = False`."
        )
    if not torch.is_grad_enabled():
        raise InvalidLossesError(
            "Gradients are disabled (`torch.no_grad` or inference mode). Compute the losses and "
            "call the engine with gradients enabled."
        )
    if not losses.requires_grad:
        raise InvalidLossesError(
            "The losses do not require a gradient: they were detached, computed with gradients "
            "disabled, or computed from frozen parameters alone. Keep their graph."
        )
    if isinstance(batch_dim, int) and not -losses.dim() <= batch_dim < max(losses.dim(), 1):
        raise InvalidBatchDimError(
            f"`batch_dim` is {batch_dim}, but the losses have shape {tuple(losses.shape)}. Keep "
            "one loss per sample (`reduction='none'`), or pass `batch_dim=None` to `Engine`."
        )
    if losses.dim() == 0 and batch_dim is not None and "reduced" not in told:
        told.add("reduced")
        warn_user(
            "Keep one loss for each sample (`reduction='none'`, no `.mean()`), or pass "
            "`batch_dim=None` to `Engine`: the losses are one number, and the Gramian is 1 x 1.",
            CoupledObjectivesWarning,
        )


def check_square(gramian: Tensor) -> None:
    """Refuses anything but a square matrix of real floating-point numbers."""
    given: object = gramian
    if not isinstance(given, Tensor) or not gramian.is_floating_point():
        kind = type(given).__name__
        raise InvalidOperandError(
            f"The Gramian is a {kind}{f' of {given.dtype}' if isinstance(given, Tensor) else ''}. "
            "Pass a tensor of real floating-point numbers, as returned by `compute_gramian`."
        )
    if place := without_values(gramian):
        raise InvalidOperandError(
            f"The Gramian is {place}, which has no values. Pass a result of `compute_gramian`."
        )
    if gramian.dim() != 2 or gramian.shape[0] != gramian.shape[1]:
        raise InvalidOperandError(
            f"The Gramian has shape {tuple(gramian.shape)}. Pass a square matrix, `(m, m)`."
        )


def labels(by: Grouping | None, names: Names) -> dict[Tensor, str]:
    """The group of each grouped parameter; by default, each parameter is its own group."""
    if by is None or callable(by):
        return {parameter: by(name) if by else name for parameter, name in names.items()}
    if hasattr(by, "param_groups"):
        raise InvalidOperandError(
            f"The groups are a `{type(by).__name__}`. Pass `optimizer.param_groups`."
        )
    groups: list[Any] = list(by)
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise InvalidOperandError(
            "The groups are not an optimizer's groups. Pass `optimizer.param_groups`, or a "
            "function from a parameter's name to its group."
        )
    titles = [str(group.get("name", i)) for i, group in enumerate(groups)]
    if same := [title for title, count in Counter(titles).items() if count > 1]:
        raise InvalidOperandError(
            f"Several groups of the optimizer are called `{same[0]}`; a group without a `name` is "
            "called by its number. Give each group a different name, or pass a function from a "
            "parameter's name to its group."
        )
    titled = {
        p: title for group, title in zip(groups, titles, strict=True) for p in group["params"]
    }
    return {parameter: titled[parameter] for parameter in names if parameter in titled}


def direction_of(direction: Direction, names: Names) -> dict[Tensor, Tensor]:
    """A direction by parameter, from tensors by name or in the order of the names."""
    if isinstance(direction, Tensor) or not isinstance(direction, Iterable):
        raise InvalidOperandError(
            f"The direction is a {type(direction).__name__}. Pass a dict of tensors by name, or "
            "a list with a tensor for each of `names`."
        )
    if not isinstance(direction, Mapping):
        direction = list(direction)
        if len(direction) != len(names):
            raise InvalidOperandError(
                f"The direction has {len(direction)} tensors, and the Jacobian is of "
                f"{len(names)} parameters. Pass a tensor for each of `names`, or a dict."
            )
        direction = dict(zip(names.values(), direction, strict=True))
    by_parameter = {}
    for name, tensor in direction.items():
        parameter = parameter_of(name, names)
        if not isinstance(tensor, Tensor):
            raise InvalidOperandError(
                f"The direction's entry `{name}` is a {type(tensor).__name__}. Pass a tensor."
            )
        if place := without_values(tensor):
            raise InvalidOperandError(
                f"The direction's entry `{name}` is {place}, which has no values. Pass a tensor on "
                f"the parameter's device, `{parameter.device}`."
            )
        if tensor.is_complex() and not parameter.is_complex():
            raise InvalidOperandError(
                f"The direction's entry `{name}` has dtype {tensor.dtype}, and the parameter has "
                f"{parameter.dtype}. Pass real numbers."
            )
        if tensor.shape != parameter.shape:
            raise InvalidOperandError(
                f"The direction's entry `{name}` has shape {tuple(tensor.shape)}, and the "
                f"parameter has {tuple(parameter.shape)}. Pass a tensor of that shape."
            )
        if parameter.is_complex():
            tensor = tensor.to(torch.promote_types(tensor.dtype, parameter.dtype))
        by_parameter[parameter] = tensor.detach()
    return by_parameter


def check_related(names: Names, others: Names) -> None:
    """Refuses Jacobians without a common parameter."""
    if names.keys().isdisjoint(others):
        raise InvalidOperandError(
            "The two Jacobians have no parameter in common. Both must be of the same modules: "
            "make them with one engine, or with engines on the same model."
        )


def check_selection(objectives: object, names: object) -> None:
    """Refuses selections whose rows are not those that they seem to select."""
    if type(objectives).__name__ in ("bool", "bool_"):  # NumPy's too
        raise InvalidOperandError(
            f"`objectives` is {objectives!r}. Pass the number of an objective, a list of numbers, "
            "or a mask `(m,)`."
        )
    if isinstance(names, str):
        raise InvalidOperandError(f"`names` is {names!r}. Pass a list of names: `[{names!r}]`.")


def parameter_of(name: str, names: Names) -> Tensor:
    """The parameter with this name."""
    for parameter, its_name in names.items():
        if its_name == name:
            return parameter
    raise InvalidOperandError(
        f"`{name}` is not a parameter of the Jacobian. `names` lists them, without frozen ones."
    )
