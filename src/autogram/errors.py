"""Errors and warnings of autogram, each with the builtin that it refines; formatting of texts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

__all__ = [
    "AutogramError",
    "ChangedTensorError",
    "CompiledPartWarning",
    "CoupledObjectivesWarning",
    "FreedGraphError",
    "HookError",
    "InexactWeightsWarning",
    "InvalidBatchDimError",
    "InvalidLossesError",
    "InvalidModulesError",
    "InvalidOperandError",
    "InvalidOptionError",
    "MemoryLimitError",
    "MixedSamplesError",
    "NonFiniteError",
    "NotConnectedError",
    "RankError",
    "RemovedEngineError",
    "RuleCheckError",
    "RuleError",
    "StaleCaptureError",
    "UnseenUseError",
    "UnseenUseWarning",
    "UnsupportedError",
    "UnverifiedWarning",
    "VerificationError",
]


class AutogramError(Exception):
    """Base of every error that autogram raises on purpose."""


class InvalidModulesError(AutogramError, ValueError):
    """The modules passed to an engine cannot be hooked together."""


class InvalidLossesError(AutogramError, ValueError):
    """The tensor of objectives has no Jacobian that can be computed."""


class InvalidBatchDimError(AutogramError, IndexError):
    """``batch_dim`` is not a dimension of the losses."""


class InvalidOptionError(AutogramError, ValueError):
    """An option has an invalid value."""


class NotConnectedError(AutogramError, ValueError):
    """The losses do not depend on any recorded use of a parameter."""


class MixedSamplesError(AutogramError, ValueError):
    """The samples meet before a parameter is used, so the losses are not per-sample."""


class NonFiniteError(AutogramError, ArithmeticError):
    """A cotangent, a gradient, a Gramian or weights are not finite."""


class InvalidOperandError(AutogramError, ValueError):
    """An argument has the wrong shape or type for a method."""


class ChangedTensorError(AutogramError, RuntimeError):
    """A tensor that a Jacobian is made of was changed in place."""


class FreedGraphError(AutogramError, RuntimeError):
    """The graph of the losses was freed by an earlier backward pass."""


class UnsupportedError(AutogramError, NotImplementedError):
    """A call that is valid in PyTorch would give a wrong result here, and is refused.

    PyTorch raises the same builtin for operations that a backend does not support.
    """


class UnseenUseError(AutogramError, RuntimeError):
    """A parameter is used where calls are not recorded, and the engine has ``unseen="error"``."""


class VerificationError(AutogramError, ArithmeticError):
    """A result does not agree with an ordinary backward pass.

    Attributes:
        gaps: The distance between the gradients of a random sum of the losses, by parameter name:
            the norm of the difference, relative to the larger norm. Empty if the gradients
            agree, but a Gramian or another product does not.
        is_of_samples: Whether they agree if the whole batch is treated as one sample.
        is_late: Whether results of earlier calls are in doubt, too.
    """

    def __init__(
        self, message: str, *, gaps: dict[str, float], is_of_samples: bool, is_late: bool = False
    ) -> None:
        super().__init__(message)
        self.gaps = gaps
        self.is_of_samples = is_of_samples
        self.is_late = is_late

    def since(self, calls: tuple[int, int]) -> VerificationError:
        """The same error, if layouts were wrong since the first of two ``calls``."""
        return VerificationError(
            f"The results of the calls {calls[0]} to {calls[1]} of this engine are in doubt: the "
            "remembered places of the samples are wrong. To go on, take the parameters from before "
            "these calls. From now on, the samples of such graphs count as mixed. "
            f'`Engine(..., verify="always")` would have found this at once. {self}',
            gaps=self.gaps,
            is_of_samples=self.is_of_samples,
            is_late=True,
        )


class StaleCaptureError(AutogramError, RuntimeError):
    """A captured step was replayed with values for which it is wrong."""


class HookError(AutogramError, ValueError):
    """A hook is registered twice, takes other arguments than its kind, or does not exist."""


class RuleError(AutogramError, ValueError):
    """A rule is registered twice, or its recipe does not fit the call."""


class MemoryLimitError(AutogramError, torch.OutOfMemoryError):
    """Memory ran out during a contraction, even with a smaller limit."""


class RemovedEngineError(AutogramError, RuntimeError):
    """The engine was removed from its modules."""


class RankError(AutogramError, RuntimeError):
    """A step of several processes failed in one of them, or they do not fit together.

    All processes raise it, except an interrupted one, and the next step works.

    Attributes:
        ranks: The processes that caused it, by their number in the engine's group.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class RuleCheckError(AutogramError, AssertionError):
    """A rule disagrees with plain autograd, or has no recipe for a parameter."""


class CoupledObjectivesWarning(UserWarning):
    """The objectives are not per-sample, so the whole batch is treated as one sample."""


class UnseenUseWarning(UserWarning):
    """A parameter is used where calls are not recorded, and gets explicit rows."""


class CompiledPartWarning(UserWarning):
    """Parts of a model are compiled with a backend that hides their calls: explicit rows."""


class UnverifiedWarning(UserWarning):
    """The Gramian could not be verified, because some gradients are not finite."""


class InexactWeightsWarning(UserWarning):
    """The error of a step's weights exceeds the tolerance."""


def listed(texts: Sequence[str]) -> str:
    """Joins some texts for a message, and shortens a long list."""
    return ", ".join(texts[:8]) + f" and {len(texts) - 8} others" * (len(texts) > 8)


def in_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, from the words in each of its columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pairs = (zip(line, widths, strict=True) for line in lines)
    return ["  ".join(word.ljust(n) for word, n in words).rstrip() for words in pairs]


_PACKAGE = str(Path(__file__).parent)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns, at the line that called this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
