"""The monitor: records the Gramians that a weighting receives, and the weights it returns."""

from __future__ import annotations

from collections import deque
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from autogram._arguments import check_square, count_of
from autogram._weights import Weighting, check_weighting
from autogram.errors import UnsupportedError
from autogram.monitor._numbers import Numbers, defined, entropy_of, numbers_of, ratio


class ConflictMonitor:
    """Measures how much the objectives of a step conflict, with a few numbers per Gramian.

    A monitor with a weighting is itself a weighting: it returns the weights of its weighting,
    and computes the numbers of every ``every``-th Gramian. Without a weighting, call
    :meth:`observe`. Numbers stay on the Gramian's device until :meth:`latest`, :meth:`history`,
    :meth:`noise_scale` or :meth:`scalars` is called; nothing waits for the device before that.

    Args:
        weighting: The weighting that the monitor calls, or ``None``.
        every: The monitor looks at every ``every``-th Gramian, starting with the first. Each look
            costs some fifty small operations on tensors no larger than the Gramian.
        length: The number of looks to keep. Older ones are dropped.

    Raises:
        InvalidOptionError: ``every`` or ``length`` is not positive.
        InvalidOperandError: The weighting is not a function of a Gramian.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from autogram import Engine
        >>> from autogram.monitor import ConflictMonitor
        >>> from autogram.weightings import UPGrad
        >>> model = nn.Linear(3, 1)
        >>> engine, monitor = Engine(model), ConflictMonitor(UPGrad(), every=1)
        >>> weights = engine.backward(model(torch.randn(5, 3)).square().squeeze(1), monitor)
        >>> 0 <= monitor.latest().conflicting <= 1
        True
    """

    def __init__(
        self, weighting: Weighting | None = None, *, every: int = 10, length: int = 1000
    ) -> None:
        if weighting is not None:
            check_weighting(weighting)
        self.weighting = weighting
        self.every = count_of("every", every)
        length = count_of("length", length)
        self._seen = 0
        self._steps: deque[int] = deque(maxlen=length)
        self._looks: deque[Tensor] = deque(maxlen=length)

    def __call__(self, gramian: Tensor) -> Tensor:
        """The weights of the weighting for a Gramian ``(m, m)``, which the monitor records.

        Raises:
            UnsupportedError: There is no weighting.
            AutogramError: As for :meth:`observe`.
        """
        if self.weighting is None:
            raise UnsupportedError(
                "This monitor has no weighting to call. Make it with one, "
                "`ConflictMonitor(UPGrad())`, or pass Gramians to `observe`."
            )
        numbers = self._look(gramian)  # before the weighting, which may change the Gramian
        weights = self.weighting(gramian)
        self._keep(numbers, weights)
        return weights

    def observe(self, gramian: Tensor, weights: Tensor | None = None) -> None:
        """Looks at a Gramian, if it is the next ``every``-th.

        Args:
            gramian: ``(m, m)``.
            weights: The weights of the step, with m elements. Without weights, the entropy is NaN.

        Raises:
            InvalidOperandError: The Gramian is not square.
            UnsupportedError: A CUDA graph is being captured: its replays would not be counted.
        """
        self._keep(self._look(gramian), weights)

    def latest(self) -> Numbers:
        """The numbers of the last look. Waits for the device once.

        Raises:
            UnsupportedError: There was no look.
        """
        if not self._looks:
            raise UnsupportedError(
                "The monitor has seen no Gramian. Pass it to `engine.backward` as the weighting, "
                "or call `observe`, first."
            )
        return self._read(1)[-1]

    def history(self) -> list[tuple[int, Numbers]]:
        """All kept looks, each with the number of the step, counted from 0."""
        return list(zip(self._steps, self._read(len(self._looks)), strict=True))

    def noise_scale(self, last: int | None = None) -> float:
        """The gradient noise scale, in samples, from the averages of noise and signal over looks.

        Args:
            last: The number of looks to average over, all kept looks if ``None``. Looks that are
                not finite do not count.

        Returns:
            The ratio of the averages, which has a smaller bias than the average of the ratios. NaN
            without a look, or if the average of the signal is not positive: the noise hides the
            signal. All losses must have the same scale.

        Raises:
            InvalidOptionError: ``last`` is not positive.

        References:
            McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.
        """
        count = len(self._looks)
        if last is not None:
            count = min(count_of("last", last, ", or `None`"), count)
        finite = [x for x in self._read(count) if isfinite(x.noise) and isfinite(x.signal)]
        if not finite:
            return nan
        return ratio(sum(x.noise for x in finite), sum(x.signal for x in finite))

    def scalars(self, prefix: str = "conflict/") -> dict[str, float]:
        """The numbers of the last look, for a logger, and the noise scale of all looks.

        Args:
            prefix: The prefix of each name.

        Raises:
            UnsupportedError: There was no look.

        Example:
            >>> import torch
            >>> from autogram.monitor import ConflictMonitor
            >>> monitor = ConflictMonitor()
            >>> monitor.observe(torch.eye(3))
            >>> round(monitor.scalars()["conflict/effective_rank"], 3)
            3.0
        """
        scalars = {**vars(self.latest()), "noise_scale": self.noise_scale()}
        return {prefix + name: value for name, value in scalars.items()}

    def __repr__(self) -> str:
        name = getattr(self.weighting, "__name__", None) or repr(self.weighting)
        looks = f"{len(self._looks)} looks at {self._seen} Gramians"
        return f"ConflictMonitor({name}, every={self.every}, {looks})"

    def reset(self) -> None:
        """Forgets all looks."""
        self._seen = 0
        self._steps.clear()
        self._looks.clear()

    def _look(self, gramian: Tensor) -> Tensor | None:
        """The numbers of a Gramian without the entropy, or ``None`` if the Gramian is skipped."""
        check_square(gramian)
        if gramian.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "A monitor is called while a CUDA graph is captured, and does not see replays. "
                "Return the Gramian from the step (`return_gramian=True`), and pass it to "
                "`observe` after each replay."
            )
        self._seen += 1
        if (self._seen - 1) % self.every or not len(gramian):
            return None
        return numbers_of(gramian.detach())

    def _keep(self, numbers: Tensor | None, weights: Any) -> None:
        """Adds the entropy to a look, and keeps it."""
        if numbers is None:
            return
        entropy = numbers.new_full((), nan)
        if isinstance(weights, Tensor):  # the engine refuses anything else
            entropy = entropy_of(weights.detach()).to(numbers)
        self._steps.append(self._seen - 1)
        self._looks.append(torch.cat([numbers, entropy.unsqueeze(0)]))

    def _read(self, count: int) -> list[Numbers]:
        """The last looks, read from the device at once."""
        looks = list(self._looks)[len(self._looks) - count :]
        if len({look.device for look in looks}) > 1:
            looks = [look.cpu() for look in looks]
        rows = torch.stack(looks).tolist() if looks else []
        return [Numbers(*map(defined, row)) for row in rows]
