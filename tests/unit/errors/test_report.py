"""The report on the last Gramian: numbers by hand, words, and nothing that is kept alive."""

import json
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autogram import Engine, ParameterReport, Report
from autogram.rules import Recipe, product, register_rule, unregister_rule
from tests.unit.alive import live_tensors
from tests.unit.engines import batch, mlp, per_sample
from tests.unit.networks import call


def report_on(model: nn.Module, *inputs: Tensor, **options: Any) -> Report:
    """The report after a call."""
    engine = Engine(model, **options)
    engine.compute_gramian(per_sample(model(*inputs)))
    return engine.report()


def by_name(report: Report) -> dict[str, ParameterReport]:
    return {of.name: of for of in report.parameters}


def test_nothing_was_computed() -> None:
    engine = Engine(mlp())
    assert str(engine) == "No Gramian has been computed yet."
    assert engine.report().to_dict()["parameters"] == []


def test_short_texts() -> None:
    """One line each, where a notebook or a debugger shows the object; `print` shows the table."""
    model, head = mlp(), nn.Linear(1, 1)
    engine = Engine(model, head, batch_dim=None)
    assert repr(engine) == "Engine(Sequential, Linear; 6 parameters, batch_dim=None)"
    assert repr(engine.report()) == "Report(no Gramian has been computed yet)"
    engine = Engine(model)
    losses = model(batch(5, 3))
    engine.compute_gramian(losses)
    assert repr(engine) == "Engine(Sequential; 4 parameters, batch_dim='auto')"
    report = engine.report()
    flops = str(report).split("Contractions: ")[1].split("FLOP")[0]
    assert repr(report) == (
        f"Report(5 samples, 2 objectives of each, 4 parameters, 0 uncovered, {flops}FLOP)"
    )
    engine.remove()
    assert repr(engine) == "Engine(removed)"


class Cells(HTMLParser):
    """The texts of a table's cells, row by row, and of paragraphs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.paragraphs: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag: str, _: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)
        elif self.open[-1] == "p":
            self.paragraphs.append(data)


def test_a_table_in_a_notebook() -> None:
    """The same words as of `print`, and names cannot be elements."""
    model = nn.ModuleDict({"<b>&": nn.Linear(3, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    engine = Engine(model)
    engine.compute_gramian(per_sample(model["<b>&"](batch(5, 3))))
    report = engine.report()
    html = report._repr_html_()
    cells = Cells(html)
    assert "&lt;b&gt;&amp;.weight" in html
    head, *rows = cells.rows
    assert head[:3] == ["parameter", "shape", "calls"]
    assert [row[0] for row in rows] == ["<b>&.weight", "<b>&.bias"]
    text = str(report)
    assert all(paragraph in text for paragraph in cells.paragraphs)
    assert sum(map(len, cells.paragraphs)) > len(text) / 3
    assert "frozen.weight" in " ".join(cells.paragraphs)


def test_a_table_in_a_notebook_before_the_first_gramian() -> None:
    assert Report()._repr_html_() == "<p>No Gramian has been computed yet.</p>"


def test_numbers_of_a_linear_layer() -> None:
    """Floating-point operations are two for each multiply-add."""
    b, t, o, i = 6, 20, 3, 2
    of = by_name(report_on(nn.Linear(i, o), batch(b, t, i)))["weight"]
    assert (of.shape, of.plan) == ((o, i), "rows")
    assert of.flops == 2 * (b * t * o * i + b * b * o * i)
    assert of.gradient_flops == 2 * b * t * o * i
    itemsize = torch.get_default_dtype().itemsize
    # A cotangent and an input for each position, and cotangents times inputs.
    assert of.bytes == itemsize * (b * t * (o + i) + b * o * i)
    assert of.costs["rows"] < of.costs["factors"]


@pytest.mark.cpu
def test_factors_where_they_cost_less() -> None:
    b, o, i = 4, 30, 20
    of = by_name(report_on(nn.Linear(i, o), batch(b, i)))["weight"]
    assert of.plan == "factors"
    assert of.flops == 2 * b * b * (o + i + 1)
    assert of.costs["factors"] < of.costs["rows"]


def test_shares_and_totals() -> None:
    report = report_on(mlp(), batch(5, 3))
    assert sum(of.share for of in report.parameters) == pytest.approx(1)
    assert report.flops == sum(of.flops for of in report.parameters) > 0
    assert report.gradient_flops == sum(of.gradient_flops for of in report.parameters) > 0
    assert [of.name for of in report.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_dict_for_programs() -> None:
    report = report_on(mlp(), batch(5, 3))
    found = json.loads(json.dumps(report.to_dict()))
    assert found == report.to_dict()
    assert found["flops"] == report.flops
    assert found["parameters"][0]["shape"] == [5, 3]
    assert found["parameters"][0]["uses"][0]["layout"] == "dimension 0 (samples 5)"


def test_table() -> None:
    model = mlp()
    engine = Engine(model)
    engine.compute_gramian(per_sample(model(batch(5, 3))))
    head, _, columns, first, *_, totals = str(engine).splitlines()
    assert head.startswith("Objectives: 1 of 5 samples, by 1 backward pass through")
    assert columns.split()[:3] == ["parameter", "shape", "calls"]
    assert first.split()[:3] == ["0.weight", "5x3", "linear"]
    assert "dimension 0 (samples 5)" in first
    assert totals.startswith("Contractions: ")
    assert len({line.find("linear") for line in str(engine).splitlines() if "linear" in line}) == 1


def test_coupled_objectives() -> None:
    report = report_on(mlp(), batch(5, 3), batch_dim=None)
    assert (report.samples, report.per_sample) == (1, 5)
    assert report.parameters[0].uses[0].layout is None
    assert "5 of the whole batch as one sample, by 5 backward passes" in str(report)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).tanh() @ self.table.weight.T


def test_a_table() -> None:
    of = by_name(report_on(Tied(), torch.randint(11, (3, 5))))["table.weight"]
    assert of.plan == "lookup+rows"
    assert {use.function for use in of.uses} == {"embedding", "matmul"}


def test_a_layer_that_is_called_often() -> None:
    cell = nn.Linear(4, 4)
    report = report_on(nn.Sequential(cell, nn.Tanh(), cell, nn.Tanh(), cell), batch(5, 4))
    assert [use.index for use in report.parameters[0].uses] == [2, 1, 0]
    assert "3 x linear" in str(report)


def test_two_forward_passes() -> None:
    """Their calls have the same places."""
    model = mlp()
    engine = Engine(model)
    engine.compute_gramian(per_sample(model(batch(5, 3))) + per_sample(model(batch(5, 3))))
    assert "2 x linear" in str(engine)


def test_a_derived_tensor() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    report = report_on(model, batch(5, 4))
    of = by_name(report)["parametrizations.weight.original1"]
    assert of.uses[0].is_derived
    assert of.flops > 0
    assert "linear (derived)" in str(report)
    assert "pulling these back" in str(report)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        pytest.param(lambda x, p: x + (2 * p)[None], (3,), id="new dimension"),
        pytest.param(lambda x, p: x[:, None] + (2 * p)[None, None], (3,), id="two of them"),
        pytest.param(
            lambda x, p: x + F.embedding(torch.arange(3)[None], p)[..., 0], (5, 2), id="positions"
        ),
        pytest.param(
            lambda x, p: x.unsqueeze(2) + F.embedding(torch.arange(3)[None], p), (5, 2), id="table"
        ),
        pytest.param(lambda x, p: torch.kron(x, (2 * p)[None]), (3,), id="fallback"),
        pytest.param(lambda x, p: x * p.exp(), (), id="number"),
        pytest.param(lambda x, p: F.embedding((x > 0).long(), 2 * p)[..., 0], (2, 1), id="lookup"),
    ],
)
def test_derived_tensors_with_dimensions_of_size_one(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    model = call(function, shape)()
    of = report_on(model, batch(4, 3), batch_dim=0).parameters
    assert len(of) == 1
    assert of[0].uses[0].is_derived
    assert of[0].flops > 0


def test_rows_of_objectives_of_the_whole_batch() -> None:
    """The report names the passes, and no call of the model."""
    of = report_on(call(lambda x, p: x * p.exp(), ())(), batch(4, 3), batch_dim=None).parameters
    assert [use.function for use in of[0].uses] == ["an ordinary pass"]


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.kron(x, self.weight)


def test_a_fallback() -> None:
    report = report_on(Multiplied(), batch(5, 4))
    assert report.parameters[0].uses[0].rule is None
    assert "kron (fallback)" in str(report)
    assert "backward passes, not counted here" in str(report)


def _unflattened(size: int, cotangent: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    return cotangent.unflatten(-1, (-1, size)), input


def test_a_rule_from_elsewhere() -> None:
    @register_rule(torch.kron)
    def rule(input: Tensor, other: Tensor) -> list[Recipe]:
        unflatten = partial(_unflattened, other.shape[1])
        return [product(other, "tio,ti->1o", input, prepare=unflatten, dims="t-")]

    report = report_on(Multiplied(), batch(5, 4))
    unregister_rule(torch.kron)
    assert "kron (tests.unit.errors.test_report.test_a_rule_from_elsewhere.<locals>.rule)" in str(
        report
    )


def test_heads_of_one_form() -> None:
    """In each step another one, by graphs that look alike."""
    trunk, heads = nn.Linear(3, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
    engine = Engine(trunk, heads)
    for number in (0, 1, 1, 0, 1):
        engine.compute_gramian(per_sample(heads[number](trunk(batch(5, 3)))))
        read = {x.name for x in engine.report().parameters if x.uses}
        assert read == {"0.weight", "0.bias", f"1.{number}.weight", f"1.{number}.bias"}


def test_what_is_not_covered() -> None:
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(3, 2)})
    model["used"][0].bias.requires_grad_(False)
    engine = Engine(*model.values())
    engine.compute_gramian(per_sample(model["used"](batch(5, 3))))
    report = engine.report()
    assert report.uncovered["0.0.bias"] == "does not require a gradient."
    assert "Not covered: `1.weight` has no use with a gradient from the losses" in str(report)


def test_the_last_call_counts() -> None:
    model = mlp()
    engine = Engine(model)
    for size in (5, 4, 5, 7):
        engine.compute_gramian(per_sample(model(batch(size, 3))))
        assert engine.report().samples == size


def test_no_tensor_is_kept() -> None:
    model = Tied()
    engine = Engine(model)
    engine.compute_gramian(per_sample(model(torch.randint(11, (4, 5)))))
    before = live_tensors()  # with memory that contractions use again
    engine.compute_gramian(per_sample(model(torch.randint(11, (3, 5)))))
    assert engine.report().parameters
    assert live_tensors() == before
