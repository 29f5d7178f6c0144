"""Texts that ship with Python, and a small transformer that reads them letter by letter."""

import inspect
import textwrap
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 64
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@cache
def reference() -> str:
    """The chapters of the language reference that `help()` shows."""
    return "\n".join(topics[name] for name in sorted(topics))


@cache
def source_code() -> str:
    """The code of a module of the standard library: another language to the model."""
    return inspect.getsource(textwrap)


@cache
def alphabet() -> str:
    """All letters of the reference, and one that stands for any other."""
    return "".join(sorted(set(reference()))) + _UNKNOWN


def encode(text: str) -> Tensor:
    """The numbers of letters."""
    places = {letter: i for i, letter in enumerate(alphabet())}
    return torch.tensor([places.get(letter, places[_UNKNOWN]) for letter in text])


def decode(numbers: Tensor) -> str:
    """The letters of numbers."""
    return "".join(alphabet()[i] for i in numbers.tolist())


class Text:
    """A text to draw from: the first nine tenths for training, the rest for validation."""

    def __init__(self, text: str) -> None:
        numbers = encode(text)
        cut = len(numbers) * 9 // 10
        self.training, self.validation = numbers[:cut], numbers[cut:]

    def draw(self, size: int) -> Tensor:
        """Random pieces of the training part, ``(size, LENGTH + 1)``."""
        starts = torch.randint(len(self.training) - LENGTH - 1, (size, 1))
        return self.training[starts + torch.arange(LENGTH + 1)]

    def pieces(self, most: int = 64) -> Tensor:
        """The same pieces of the validation part in each call, ``(n, LENGTH + 1)``."""
        count = min(most, (len(self.validation) - 1) // LENGTH)
        starts = torch.linspace(0, len(self.validation) - LENGTH - 1, count).long().unsqueeze(1)
        return self.validation[starts + torch.arange(LENGTH + 1)]


class Block(nn.Module):
    """Attention to earlier letters, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, width)`` to the same shape."""
        parts = self.attend(self.first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        result: Tensor = x + self.narrow(F.gelu(self.widen(self.second(x))))
        return result


class LanguageModel(nn.Module):
    """A transformer that scores each next letter."""

    def __init__(self, width: int = 96, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(alphabet()), width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, len(alphabet()))

    def forward(self, numbers: Tensor) -> Tensor:
        """Maps letters ``(B, T)`` to scores ``(B, T, letters)``."""
        x = self.letters(numbers) + self.places[: numbers.shape[1]]
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


def losses_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """The mean loss of the letters of each piece, in bits, ``(B,)``."""
    scores = model(pieces[:, :-1])
    losses = F.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten(), reduction="none")
    return losses.view(len(pieces), -1).mean(1) / torch.log(torch.tensor(2.0))


def validate(model: nn.Module, text: Text) -> float:
    """Bits per letter on text that the training has not seen."""
    with torch.no_grad():
        return float(losses_of(model, text.pieces()).mean())


def write(model: nn.Module, begin: str, count: int) -> str:
    """Continues a text."""
    numbers = encode(begin).unsqueeze(0)
    with torch.no_grad():
        for _ in range(count):
            scores = model(numbers[:, -LENGTH:])[:, -1] / 0.7
            numbers = torch.cat([numbers, torch.multinomial(scores.softmax(1), 1)], 1)
    return decode(numbers[0])
