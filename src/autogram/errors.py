"""Errors and warnings of autogram: one base, and the builtin that each refines. Forms of text."""

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
    """The modules given to an engine cannot be hooked together."""


class InvalidLossesError(AutogramError, ValueError):
    """The tensor of objectives has no Jacobian that can be computed."""


class InvalidBatchDimError(AutogramError, IndexError):
    """``batch_dim`` is not a dimension of the losses."""


class InvalidOptionError(AutogramError, ValueError):
    """An option has a value that it cannot have."""


class NotConnectedError(AutogramError, ValueError):
    """No recorded use of a parameter is reachable from the losses."""


class MixedSamplesError(AutogramError, ValueError):
    """The samples meet before a parameter is used, so the losses are not per-sample."""


class NonFiniteError(AutogramError, ArithmeticError):
    """A cotangent, a gradient or a Gramian from which something follows is not finite."""


class InvalidOperandError(AutogramError, ValueError):
    """An argument has the wrong shape or type for a method."""


class ChangedTensorError(AutogramError, RuntimeError):
    """A tensor that a Jacobian is made of was changed in place."""


class FreedGraphError(AutogramError, RuntimeError):
    """The graph of the losses was freed by an earlier backward pass."""


class UnsupportedError(AutogramError, NotImplementedError):
    """A call that is valid PyTorch has no right result here, and is refused.

    The builtin is the one that PyTorch raises for what a backend does not have.
    """


class UnseenUseError(AutogramError, RuntimeError):
    """A parameter is used where calls are not recorded, and the engine is told to refuse that."""


class VerificationError(AutogramError, ArithmeticError):
    """A result and an ordinary backward pass do not agree.

    Attributes:
        gaps: How far the gradients of a random sum of the losses are apart, by name of the
            parameter: the norm of the difference, relative to the larger norm. Empty if gradients
            agree, and a Gramian or another product does not.
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
        """The same error, where layouts were wrong since the first of two ``calls``."""
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
    """A captured step was replayed with values that it is not right for."""


class HookError(AutogramError, ValueError):
    """A hook is registered twice, cannot be called as its kind is, or does not exist."""


class RuleError(AutogramError, ValueError):
    """A rule is registered twice, or its recipe does not fit the call."""


class MemoryLimitError(AutogramError, torch.OutOfMemoryError):
    """Memory ran out during a contraction, also with a smaller limit."""


class RemovedEngineError(AutogramError, RuntimeError):
    """The engine was removed from its modules."""


class RankError(AutogramError, RuntimeError):
    """A step of several processes failed in one of them, or they do not fit together.

    All of them raise it, but for one that was interrupted, and the next step works.

    Attributes:
        ranks: The processes that are to blame, by their number in the engine's group.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class RuleCheckError(AutogramError, AssertionError):
    """A rule disagrees with plain autograd, or did not answer for a parameter."""


class CoupledObjectivesWarning(UserWarning):
    """The objectives are not per-sample, so the whole batch is treated as one sample."""


class UnseenUseWarning(UserWarning):
    """A parameter is used where calls are not recorded, and gets explicit rows."""


class CompiledPartWarning(UserWarning):
    """Parts of a model are compiled so that nothing is seen inside, and get explicit rows."""


class UnverifiedWarning(UserWarning):
    """The Gramian could not be verified, because some gradients are not finite."""


class InexactWeightsWarning(UserWarning):
    """The weights of a step fulfil their optimality conditions only roughly."""


def listed(texts: Sequence[str]) -> str:
    """Some texts in a message, of which there may be many."""
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
