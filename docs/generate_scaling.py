"""Writes the tables of `docs/scaling.md`: what one Gramian of many ranks sends, from shapes alone.

`python docs/generate_scaling.py` writes the tables into the page; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent / "scaling.md"

SAMPLES = 4
TOKENS = 2048
RANKS = (8, 64, 1000)
BYTES_A_SECOND = 50e9
MULTIPLY_ADDS_A_SECOND = 200e12  # of bfloat16 matrices
MULTIPLY_ADDS_OF_ROWS = 25e12  # of float32 matrices
ROW_BYTES = 4  # rows and gradients are float32
FACTOR_BYTES = 2  # activations and cotangents are bfloat16


@dataclass(frozen=True)
class Linear:
    """Layers of one kind: the sizes of a weight, and how many there are."""

    inputs: int
    outputs: int
    count: int
    shares_input: int = 1
    """How many of these layers have the same input."""

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.count * self.inputs * self.outputs

    @property
    def factors(self) -> int:
        """Elements of all factors of one token: inputs, once for each, and cotangents."""
        return self.count * (self.inputs // self.shares_input + self.outputs)


@dataclass(frozen=True)
class Model:
    """A language model, as its large parameters. Norms and biases are left out."""

    name: str
    layers: tuple[Linear, ...]
    embedding: tuple[int, int]
    """Rows and columns of the table, whose factors are one row of cotangents for each token."""
    is_tied: bool = False
    """Whether the last layer has the embedding as its weight."""

    @property
    def parameters(self) -> int:
        """All elements."""
        table = 0 if self.is_tied else self.embedding[0] * self.embedding[1]
        return sum(x.parameters for x in self.layers) + table


GPT2 = Model(
    "GPT-2 small",
    (
        Linear(768, 3 * 768, 12),
        Linear(768, 768, 12),
        Linear(768, 3072, 12),
        Linear(3072, 768, 12),
        Linear(768, 50257, 1),
    ),
    (50257, 768),
    is_tied=True,
)
LLAMA = Model(
    "7B",
    (
        Linear(4096, 4096, 3 * 32, shares_input=3),
        Linear(4096, 4096, 32),
        Linear(4096, 11008, 2 * 32, shares_input=2),
        Linear(11008, 4096, 32),
        Linear(4096, 32000, 1),
    ),
    (32000, 4096),
)


@dataclass(frozen=True)
class Cost:
    """What one rank sends and computes in a step.

    Attributes:
        rows: Bytes, if all weights are exchanged as rows.
        ring: Bytes, if all go as factors around half a ring.
        chosen: Bytes, if each weight goes its cheaper way, and tables as factors.
        gradients: Bytes of an all-reduce of the gradients, as DistributedDataParallel makes it.
        products: Multiply-adds of the products of rows, a slice for each rank.
        step: Multiply-adds of a forward and a backward pass.
    """

    rows: float
    ring: float
    chosen: float
    gradients: float
    products: float
    step: float


def cost(model: Model, ranks: int) -> Cost:
    """The cost of a step in which each rank has some samples."""
    others, half, m = (ranks - 1) / ranks, ranks // 2, SAMPLES * ranks
    rows = [SAMPLES * x.parameters * ROW_BYTES * others for x in model.layers]
    ring = [half * SAMPLES * TOKENS * x.factors * FACTOR_BYTES for x in model.layers]
    table = half * SAMPLES * TOKENS * (model.embedding[1] * FACTOR_BYTES + 8)  # and the tokens
    if model.is_tied:
        ring[-1] += table
    else:
        ring.append(table)
        rows.append(SAMPLES * model.embedding[0] * model.embedding[1] * ROW_BYTES * others)
    n = model.parameters
    return Cost(
        sum(rows),
        sum(ring),
        sum(map(min, rows, ring)),
        2 * others * n * ROW_BYTES,
        m * m * n / ranks,
        3 * n * SAMPLES * TOKENS,
    )


def tables() -> dict[str, str]:
    """Each table of the page, by name."""
    return {"sent": "\n".join(_sent()), "computed": "\n".join(_computed())}


def _sent() -> Iterator[str]:
    """What is sent."""
    yield "| Model | Ranks | As rows | As factors | Cheapest | All-reduce of gradients | Ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for model in (GPT2, LLAMA):
        for ranks in RANKS:
            of = cost(model, ranks)
            sizes = " | ".join(map(_size, (of.rows, of.ring, of.chosen, of.gradients)))
            ratio = f"{of.chosen / of.gradients:.1f}"
            yield f"| {model.name}, {_count(model.parameters)} | {ranks} | {sizes} | {ratio} |"


def _computed() -> Iterator[str]:
    """What is computed beside the step."""
    yield "| Model | Ranks | Objectives | Products of rows | Forward and backward pass | Ratio |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for model in (GPT2, LLAMA):
        for ranks in RANKS:
            of = cost(model, ranks)
            products, step = of.products / MULTIPLY_ADDS_OF_ROWS, of.step / MULTIPLY_ADDS_A_SECOND
            times = f"{_time(products)} | {_time(step)} | {products / step:.2f}"
            yield f"| {model.name} | {ranks} | {SAMPLES * ranks} | {times} |"


def most_ranks() -> float:
    """With how many ranks the products of rows take as long as the passes of a step."""
    return 3 * TOKENS / SAMPLES * MULTIPLY_ADDS_OF_ROWS / MULTIPLY_ADDS_A_SECOND


def _size(count: float) -> str:
    """Bytes, and the time that the link takes for them."""
    return f"{count / 1e9:,.1f} GB, {_time(count / BYTES_A_SECOND)}"


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _count(parameters: int) -> str:
    if parameters < 1e9:
        return f"{parameters / 1e6:.0f} million"
    return f"{parameters / 1e9:.1f} billion"


def page() -> str:
    """The page with its tables as they are now."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + table + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
