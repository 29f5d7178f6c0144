"""Losses in the forms that users may pass: one tensor, or several in a list or a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autogram._arguments import check_values, is_integer
from autogram._capture.backward.driver import BatchDim
from autogram._capture.samples.objectives import Objectives
from autogram.errors import InvalidBatchDimError, InvalidLossesError, InvalidOperandError

Losses = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
L = TypeVar("L", Tensor, Sequence[Tensor], Mapping[str, Tensor])


def as_one_tensor(losses: Losses, batch_dim: BatchDim, told: set[str]) -> Tensor:
    """Losses as one tensor: numbers as ``(K,)``, and losses of B samples as ``(B, K)``.

    In a list of numbers, each number belongs to the whole batch, so no warning is needed.

    Args:
        losses: A tensor, which is returned unchanged, or several.
        batch_dim: As for the engine.
        told: The warnings already issued, to which unnecessary ones are added.
    """
    if isinstance(losses, Tensor):
        return losses
    parts = parts_of(losses)
    for part in parts:  # before they are joined
        check_values(part)
    if batch_dim is None or all(part.dim() == 0 for part in parts):
        told.update({"coupled", "reduced"})
        return torch.cat([part.reshape(-1) for part in parts])
    if batch_dim not in (0, "auto") or not _are_per_sample(parts):
        raise InvalidLossesError(
            f"The losses have the shapes {', '.join(str(tuple(part.shape)) for part in parts)}, "
            f"and `batch_dim` is {batch_dim!r}. Several losses fit together if each is one number, "
            "or if the first dimension of each counts the same samples (use zero for a missing "
            "loss). For different batches, pass one tensor (`torch.cat`); for any losses, "
            "pass `batch_dim=None` to `Engine`."
        )
    return torch.cat([part.unsqueeze(-1).flatten(1) for part in parts], 1)


def are_single(losses: Losses) -> bool:
    """Whether several losses are one number each: losses of the whole batch."""
    return not isinstance(losses, Tensor) and all(part.dim() == 0 for part in parts_of(losses))


def weights_like(weights: Tensor, losses: Losses, batch_dim: BatchDim) -> Any:
    """Weights of all objectives, one by one, in the form of the losses."""
    if isinstance(losses, Tensor):
        return weights.reshape(losses.shape)
    parts = parts_of(losses)
    flat = weights.flatten()
    if are_single(losses):
        return in_form([flat[i] for i in range(len(parts))], losses)
    each = zip(_places(parts, batch_dim), parts, strict=True)
    return in_form([flat[place].reshape(part.shape) for place, part in each], losses)


def gramians_by_task(gramian: Tensor, losses: L, *, batch_dim: int | None = 0) -> L:
    """The Gramian of each task: a diagonal block, in the order of the task's objectives.

    Args:
        gramian: The Gramian of all objectives of the losses, ``(m, m)``.
        losses: The losses of the Gramian: K losses for each of B samples, or a
            list or a dict with the losses of each task.
        batch_dim: As for the engine; for ``"auto"``, pass 0, or ``None`` for objectives of the
            whole batch.

    Returns:
        For a tensor, ``(K, B, B)``, with K the product of all other dimensions in row-major order.
        For a list or a dict, a list or a dict with a square matrix for each entry, with as many
        rows as the entry has elements. The matrices contain entries of the Gramian.

    Raises:
        InvalidBatchDimError: ``batch_dim`` is not a dimension of the losses.
        InvalidOperandError: The Gramian and the losses differ in size.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine, gramians_by_task
        >>> trunk = nn.Linear(3, 4)
        >>> engine = Engine(trunk)
        >>> y = trunk(torch.randn(5, 3))
        >>> losses = {"size": y[:, 0].square(), "sign": y[:, 1:].sigmoid().sum(1)}
        >>> gramians = gramians_by_task(engine.compute_gramian(losses), losses)
        >>> gramians["size"].shape
        torch.Size([5, 5])
    """
    parts = parts_of(losses)
    m = sum(part.numel() for part in parts)
    if tuple(gramian.shape) != (m, m):
        raise InvalidOperandError(
            f"The Gramian has shape {tuple(gramian.shape)}, and there are {m} losses. Pass the "
            "losses that it was computed from."
        )
    if isinstance(losses, Tensor):
        dims = range(-losses.dim(), losses.dim())
        if batch_dim is not None and not (is_integer(batch_dim) and batch_dim in dims):
            raise InvalidBatchDimError(
                f"`batch_dim` is {batch_dim!r}, and the losses have shape {tuple(losses.shape)}. "
                "Pass the dimension that counts the samples, or `None` for objectives of the whole "
                "batch."
            )
        batch_dim = None if batch_dim is None else int(batch_dim)
        places = Objectives(losses, batch_dim).numbers(device=gramian.device)  # (k, b)
        return gramian[places.unsqueeze(2), places.unsqueeze(1)]
    gramians = [gramian[place][:, place] for place in _places(parts, batch_dim)]
    return in_form(gramians, losses)  # type: ignore[no-any-return]  # mypy knows no form of a value


def shapes_of(losses: Losses) -> Any:
    """Tensors without data, in the form of the losses: all that the form of weights needs."""
    return in_form([torch.empty(x.shape, device="meta") for x in parts_of(losses)], losses)


def in_form(found: list[Tensor], losses: Losses) -> Any:
    """Tensors in the form of the losses: one, a list, or a dict."""
    if isinstance(losses, Tensor):
        return found[0]
    return dict(zip(losses, found, strict=True)) if isinstance(losses, Mapping) else found


def parts_of(losses: Losses) -> list[Tensor]:
    """The tensors of the losses."""
    if isinstance(losses, Tensor):
        return [losses]
    given: Any = losses
    if not isinstance(given, Mapping | list | tuple):
        raise InvalidLossesError(
            f"The losses are a {type(given).__name__}. Pass a tensor, or a list or a dict of them."
        )
    for key, part in given.items() if isinstance(given, Mapping) else enumerate(given):
        if not isinstance(part, Tensor):
            raise InvalidLossesError(
                f"The losses have a {type(part).__name__} at {key!r}. Pass a tensor, or a list or "
                "a dict of tensors."
            )
    if not losses:
        raise InvalidLossesError(
            "There are no losses: the list or dict is empty. Pass at least one loss."
        )
    return list(losses.values() if isinstance(losses, Mapping) else losses)


def _are_per_sample(parts: Sequence[Tensor]) -> bool:
    """Whether the first dimension of several losses may count the samples."""
    return all(part.dim() > 0 for part in parts) and len({len(part) for part in parts}) == 1


def _places(parts: Sequence[Tensor], batch_dim: BatchDim) -> list[Tensor]:
    """The numbers of the objectives of each loss, among all of them as they are joined."""
    each = [part.numel() for part in parts]
    places = torch.arange(sum(each), device="cpu")
    if batch_dim is None or not _are_per_sample(parts):
        return list(places.split(each))
    samples = len(parts[0])
    several = [n // max(samples, 1) for n in each]
    columns = places.view(samples, sum(several)).split(several, 1)
    return [column.flatten() for column in columns]
