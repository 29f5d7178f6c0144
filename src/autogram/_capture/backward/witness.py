"""Witnesses: facts about J from autograd, with which the engine's products are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import hypot

import torch
from torch import Tensor

from autogram._blocks import as_real
from autogram.errors import VerificationError


class Witness:
    """Autograd's Jᵀ u for a random vector u.

    Comparing a product takes one inner product and no additional pass: uᵀ G u must be ‖Jᵀ u‖², and
    wᵀ G u must be ⟨Jᵀ w, Jᵀ u⟩ for any w.

    Args:
        vector: u, ``(m,)`` in the order of the losses. It is zero for objectives without a witness.
        gradients: Jᵀ u for each parameter, in real numbers. Zero for parameters not in it.
        tolerance: The largest relative error of a right result.
        rounding: The largest change of the norm of Jᵀ u by rounding, if this was measured.
    """

    def __init__(
        self,
        vector: Tensor,
        gradients: Mapping[Tensor, Tensor],
        tolerance: float,
        rounding: float = 0.0,
    ) -> None:
        self.gradients = gradients
        self._vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
        self._tolerance, self._rounding = tolerance, rounding
        self._norm = self._size = hypot(*[norm(gradient) for gradient in gradients.values()])
        self._elements = sum(gradient.numel() for gradient in gradients.values())
        self._image: Tensor | None = None  # J Jᵀ u

    @classmethod
    def together(cls, parts: Sequence[tuple[Witness | None, int]]) -> Witness | None:
        """Joins the witnesses of several parts, given with their numbers of objectives."""
        there = [witness for witness, _ in parts if witness is not None]
        if len(parts) < 2 or not there:
            return there[0] if there else None
        like = there[0]._vector
        vectors = [like.new_zeros(m) if x is None else x._vector.to(like) for x, m in parts]
        gradients: dict[Tensor, Tensor] = {}
        for parameter, gradient in [pair for x in there for pair in x.gradients.items()]:
            total = gradients.get(parameter)
            gradients[parameter] = gradient if total is None else total + gradient
        tolerance = max(witness._tolerance for witness in there)
        rounding = sum(witness._rounding for witness in there)
        return cls(torch.cat(vectors), gradients, tolerance, rounding)

    def why_wrong(self, gramian: Tensor) -> str | None:
        """Says why a Gramian ``(m, m)`` cannot be right, or returns ``None`` if it can."""
        u, t, small = self._vector.to(gramian), self._tolerance, self._lost(gramian.dtype)
        image, mirrored = gramian @ u, u @ gramian
        norms = gramian.diagonal().clamp(min=0).sqrt()
        form, average = _dot(u, image), _dot(u.square(), norms.square())  # over the signs of u
        size, square = average**0.5, self._norm**2
        # The comparison of J lets Jᵀ u differ by a share t, or by the measured rounding.
        by_columns = (2 * t + t * t) * square
        by_columns += self._rounding * (max(form, 0.0) ** 0.5 + self._norm)
        if abs(form - square) > t * max(average, form) + by_columns + small:
            return f"for a random vector u, uᵀ G u is {form:.6g} and ‖Jᵀ u‖² is {square:.6g}"
        if bool(((image - mirrored).abs() > t * size * norms + small).any()):
            return "it is not symmetric"
        self._image, self._size = image, max(size, self._norm)
        return None

    def check_gramian(self, gramian: Tensor) -> None:
        """Raises if a Gramian ``(m, m)`` is wrong. A non-finite one is not checked."""
        if bool(gramian.isfinite().all()) and (reason := self.why_wrong(gramian)):
            raise wrong_product("The Gramian", reason)

    def check_sums(
        self,
        product: str,
        sums: Mapping[Tensor, Tensor | None],
        weights: Tensor,
        image: Callable[[], Tensor],
    ) -> None:
        """Raises if Jᵀ w is wrong.

        Args:
            product: The name of the compared product.
            sums: Jᵀ w of each parameter, ``(*parameter)`` or ``(s, *parameter)``.
            weights: w, ``(s, m)``; or the numbers of s objectives, whose rows are ``sums``.
            image: Computes J Jᵀ u, ``(m,)``, with the engine. Called if no Gramian is known.
        """
        if self._image is None:
            self._image = image()
            self._check_image(self._image, self.gradients)
        if weights.dim() == 2:
            w = weights.to(self._image)
            expected, most = w @ self._image, w.abs() @ self._image.abs()
        else:
            expected = self._image[weights.to(self._image.device)]
            most = expected.abs()
        self._check_sums(product, sums, expected, most)

    def check_sums_by_group(
        self,
        product: str,
        sums: Mapping[Tensor, Tensor | None],
        groups: Sequence[tuple[Mapping[Tensor, str], Tensor]],
        image: Callable[[Mapping[Tensor, Tensor]], Tensor],
    ) -> None:
        """Raises if Jᵀ w is wrong, where each group of parameters has its own weights.

        Args:
            product: The name of the compared product.
            sums: The weighted sum of each parameter.
            groups: Parameters, and their weights ``(m,)``.
            image: Computes J v, ``(m,)``, with the engine, for parts v of Jᵀ u.
        """
        # Each group acts as a separate copy of every objective.
        totals: list[tuple[Tensor, Tensor]] = []
        for parameters, weights in groups:
            gradients = {p: x for p, x in self.gradients.items() if p in parameters}
            of_group = image(gradients)
            self._check_image(of_group, gradients)
            w = weights.to(of_group)
            totals.append((w @ of_group, w.abs() @ of_group.abs()))
        if totals:
            expected, most = [
                torch.stack(x).sum(0, keepdim=True) for x in zip(*totals, strict=True)
            ]
            self._check_sums(product, sums, expected, most)

    def _check_image(self, image: Tensor, gradients: Mapping[Tensor, Tensor]) -> None:
        """Raises if J v, ``(m,)``, is wrong, where v is Jᵀ u or a part of it."""
        length = hypot(*[norm(gradient) for gradient in gradients.values()])
        square, size = length**2, _dot(self._vector.abs(), image.abs())
        error = self._rounding * length
        self._compare("J Jᵀ u", _dot(self._vector, image), square, size + square, error)

    def _check_sums(
        self, product: str, sums: Mapping[Tensor, Tensor | None], expected: Tensor, most: Tensor
    ) -> None:
        """Raises if inner products of sums, ``(s, ...)``, with Jᵀ u are not as expected."""
        totals, squares = torch.zeros_like(expected), torch.zeros_like(expected)
        for parameter, total in sums.items():
            if total is None or not len(expected):
                continue
            flat = real_numbers(total).reshape(len(expected), -1)
            squares += torch.linalg.vector_norm(flat, dim=1).square().to(squares)
            if (gradient := self.gradients.get(parameter)) is not None:
                totals += (flat @ real_numbers(gradient).reshape(-1).to(flat)).to(totals)
        lengths = squares.sqrt()
        sizes, errors = most + self._size * lengths, self._rounding * lengths
        for each in zip(*[x.tolist() for x in (totals, expected, sizes, errors)], strict=True):
            self._compare(product, *each)

    def check_directional(
        self, product: str, found: Tensor, direction: Mapping[Tensor, Tensor]
    ) -> None:
        """Raises if J v, ``(m,)``, is wrong."""
        u = self._vector.to(found)
        pairs = [(x, of) for p, x in direction.items() if (of := self.gradients.get(p)) is not None]
        flat = [(real_numbers(x).reshape(-1), real_numbers(of).reshape(-1)) for x, of in pairs]
        expected = sum([float(x @ of.to(x)) for x, of in flat])
        length = hypot(*[norm(x) for x in direction.values()])
        most = _dot(u.abs(), found.abs()) + self._size * length
        self._compare(product, _dot(u, found), expected, most, self._rounding * length)

    def _compare(
        self, product: str, found: float, expected: float, size: float, error: float
    ) -> None:
        """Raises if two numbers differ by more than rounding explains. NaN is not compared."""
        lost = self._lost(self._vector.dtype)
        if abs(found - expected) > self._tolerance * size + error + lost:
            raise wrong_product(
                product, f"its inner product with Jᵀ u is {found:.6g} and not {expected:.6g}"
            )

    def _lost(self, dtype: torch.dtype) -> float:
        """The loss in a sum of products, if each of them is below the smallest number."""
        return float(torch.finfo(dtype).tiny) * len(self._vector) ** 2 * max(1, self._elements)


def wrong_product(product: str, reason: str) -> VerificationError:
    """The error for a wrong product, if J is right."""
    return VerificationError(
        f"{product} does not agree with an ordinary backward pass, although the gradient of each "
        f"parameter does: {reason}. A contraction is wrong, or an order of the results. It is a "
        "bug of autogram, or of a kernel of the device: please report it with this line. "
        "`Engine(model, batch_dim=None)` uses another way, which is slower.",
        gaps={},
        is_of_samples=False,
    )


def norm(tensor: Tensor | None) -> float:
    """The norm of a tensor, added up in double precision; zero for ``None``."""
    if tensor is None:
        return 0.0
    return float(torch.linalg.vector_norm(real_numbers(tensor), dtype=torch.float64))


def _dot(first: Tensor, second: Tensor) -> float:
    """An inner product of two vectors over the objectives, in double precision."""
    return float(first.double() @ second.to(first.device, torch.float64))


def real_numbers(tensor: Tensor) -> Tensor:
    """Real numbers in at least float32: PyTorch promotes no float8."""
    tensor = as_real(tensor)
    return tensor.to(torch.float32) if tensor.dtype.itemsize < 4 else tensor
