"""Where samples may be in a dimension."""

import pytest
import torch

from autogram._blocks import (
    Folded,
    Routed,
    Scattered,
    Subset,
    candidates,
    pieces,
)


def test_plain_layout_leaves_a_tensor_alone() -> None:
    x = torch.randn(3, 4)
    assert Folded(0, 1, 3, 1).split(x, 0) is x


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        pytest.param(Folded(0, 1, 3, 4), (3, 4, 5), id="tokens behind"),
        pytest.param(Folded(0, 4, 3, 1), (4, 3, 5), id="tokens before"),
        pytest.param(Folded(0, 2, 3, 2), (2, 3, 2, 5), id="tokens around"),
    ],
)
def test_split_of_a_fold(layout: Folded, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(layout.split(x.reshape(12, 5), 0), x)
    assert torch.equal(layout.split(x.reshape(12, 5).T, 1), x.movedim(-1, 0))


@pytest.mark.cpu
def test_places_are_copied_to_a_device_once() -> None:
    """A host that copies waits, and each use of an expert splits an input and a cotangent."""
    layout = Routed(0, 2, torch.tensor([1, 0, 1, -1]))
    x = torch.randn(4, 3)
    assert torch.equal(
        layout.split(x, 0), torch.stack([x[[1, 3]] * x.new_tensor([[1], [0]]), x[[0, 2]]])
    )
    device = torch.device("meta")
    assert layout._places_on(device) is layout._places_on(device)
    assert layout.split(x.to(device), 0).shape == (2, 2, 3)


def test_candidates_are_all_and_the_likely_ones_come_first() -> None:
    assert candidates((12, 5, 3), (0, 1, 2), 3) == [
        Folded(0, 1, 3, 4),
        Folded(0, 2, 3, 2),
        Folded(0, 4, 3, 1),
        Folded(2, 1, 3, 1),
    ]


def test_candidates_lie_in_the_given_dimensions() -> None:
    assert candidates((3, 3), (1,), 3) == [Folded(1, 1, 3, 1)]
    assert candidates((3, 3), (), 3) == []


def test_no_candidates_in_an_empty_dimension() -> None:
    assert candidates((0, 2), (0, 1), 3) == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        pytest.param(Folded(0, 1, 3, 1), "dimension 0 (samples 3)", id="plain"),
        pytest.param(Folded(1, 4, 3, 1), "dimension 1 (4 x samples 3)", id="tokens before"),
        pytest.param(Folded(0, 2, 3, 5), "dimension 0 (2 x samples 3 x 5)", id="tokens around"),
        pytest.param(Folded(0, 1, 1, 5), "dimension 0 (samples 1 x 5)", id="one sample"),
    ],
)
def test_words(layout: Folded, words: str) -> None:
    assert str(layout) == words


def test_pieces_of_a_layout_of_all_samples() -> None:
    cotangent = torch.randn(2, 3, 4)
    for layout in (Folded(0, 1, 3, 1), Routed(0, 3, torch.tensor([2, 0, 1]))):
        ((subset, within, part),) = pieces(layout, cotangent)
        assert subset is None
        assert within is layout
        assert part is cotangent


def test_pieces_of_scattered_samples() -> None:
    """One for each sample that is there, with its own elements alone."""
    samples = torch.tensor([[0, 2], [2, -1]], device="cpu")
    cotangent = torch.randn(3, 2, 2)
    found = list(pieces(Scattered(4, samples), cotangent))
    assert [subset for subset, *_ in found] == [Subset((0,), 4), Subset((2,), 4)]
    for (*_, own), sample in zip(found, (0, 2), strict=True):
        assert torch.equal(own, cotangent * (samples == sample).to(own.device))


@pytest.mark.parametrize(
    ("samples", "dims", "expected"),
    [
        ([[0, 0, 1], [2, 3, 3]], (0, 1), [((0, 2), 0), ((1, 3), 0)]),
        ([[0, 0, 1], [2, 3, 3]], (1,), [((0, 1), 1), ((2, 3), 1)]),
        ([[3, 0, 0], [0, 1, 1], [1, 2, -1], [2, 3, 3]], (0, 1), [((0, 2), 0), ((1, 3), 0)]),
        ([[0, 1], [1, 0]], (0, 1), [((0,), None), ((1,), None)]),
    ],
)
def test_scattered_samples_that_are_apart_along_a_dimension(
    samples: list[list[int]], dims: tuple[int, ...], expected: list[tuple[tuple[int, ...], int]]
) -> None:
    """They are one piece, along the dimension in which there are the fewest."""
    owners = torch.tensor(samples, device="cpu")
    found = list(pieces(Scattered(4, owners, dims), torch.ones(1, *owners.shape)))
    assert [(x.samples, y and y.dim) for x, y, _ in found] == expected
    for subset, layout, own in found:
        inside = torch.tensor(0) if layout is None else layout.owners(own[0]).cpu()
        given = torch.tensor((*subset.samples, -1))[inside].expand(owners.shape)
        is_own = own[0].cpu() == 1
        assert torch.equal(given[is_own], owners[is_own])
    assert torch.equal(sum(own.cpu() for *_, own in found)[0] == 1, owners >= 0)
