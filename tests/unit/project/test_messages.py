"""Every error in the source tells what to do, and a test checks its text."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import autogram
import autogram.testing

SOURCE = Path(autogram.__file__).parent
TESTS = Path(__file__).parents[1]
CLASSES = {
    node.name
    for node in ast.parse((SOURCE / "errors.py").read_text()).body
    if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
}

# What a user can do, or where to look. A message without any of these explains and does not help.
ADVICE = re.compile(
    r"\b(Pass|Call|Compute|Make|Keep|Leave out|Look for|Look at|Pad|Let the|Return|Register|Remove|"
    r"Set|Take|take|Pack|Both must|Check|pass|lists them|Write|Use|Give|Objectives must|compare|"
    r"Correct|Override|Run|Compile|by plain autograd)\b"
)

# Fewer characters could stand in any text.
_TELLING = 8


class Message(NamedTuple):
    """One place where an error is made."""

    place: str
    error: str
    text: str
    """The message, with ``{}`` for what is put in."""


def _text(node: ast.expr) -> str:
    """The constant parts of a string."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"


def _messages() -> Iterator[Message]:
    """All of them."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CLASSES:
                text = _text(node.args[0])
                yield Message(path.name, node.func.id, text)  # type: ignore[attr-defined]


def _strings_in_tests() -> Iterator[str]:
    """Parts of the patterns that tests look for in messages, regular expressions taken off."""
    for path in TESTS.rglob("test_*.py"):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.split(r"\.\*|\(\?s\)|\|", node.value.replace("\\", ""))


ALL = sorted(set(_messages()))
# Those that are put together elsewhere, and those of a check of a rule, which are what the user has
# asked for and no advice, are tested where they are made.
MESSAGES = [m for m in ALL if m.text != "{}" and m.error != "RuleCheckError"]
EXPECTED = {part for part in _strings_in_tests() if len(part) >= _TELLING}


def _is_tested(message: Message) -> bool:
    """Whether some test looks for a telling part of a message."""
    return any(part in message.text for part in EXPECTED)


def test_every_kind_of_error_is_raised() -> None:
    """Each class but the base has a message, and is public."""
    assert {message.error for message in ALL} == CLASSES - {"AutogramError"}
    public = {*autogram.__all__, *autogram.testing.__all__}
    assert public >= CLASSES


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: f"{m.place} {m.error} {m.text[:30]}")
def test_a_message_helps(message: Message) -> None:
    """It says what was found, in a sentence, and then what to do; and a test checks this text."""
    assert len(message.text) > 30
    assert ADVICE.search(message.text), f"no advice in: {message.text}"
    assert _is_tested(message), f"no test looks for: {message.text}"


def test_a_message_that_no_test_looks_for_is_seen() -> None:
    """What the test above would say."""
    assert not _is_tested(Message("a.py", "RuleError", "Nobody has ever seen this one: {}. Pass"))
