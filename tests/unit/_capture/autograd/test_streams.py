"""What a pass shows is taken in on the streams of its caller, and one thing at a time.

Without a GPU, streams are objects that note what they are asked for.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from autogram._capture.autograd.passes import Pass
from autogram._capture.autograd.streams import Streams
from autogram._capture.recording import Channel

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """A stream that notes in a list what it waits for, and when it is current."""

    current: dict[torch.device, "Stream"]
    notes: list[Any]

    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: "Stream") -> None:
        self.notes.append(("waits for", self.name, other.name))

    def __enter__(self) -> None:
        self.before = self.current[self.device]
        self.current[self.device] = self

    def __exit__(self, *_: object) -> None:
        self.current[self.device] = self.before


class OnGpu:
    """As much of a tensor as streams look at."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_stream(self, stream: Stream) -> None:
        Stream.notes.append(("kept for", stream.name))


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams that are current: one for each of two devices."""
    Stream.notes, Stream.current = [], {x: Stream(x, f"main {x.index}") for x in (GPU, OTHER)}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.current[device])


def test_nothing_is_done_where_streams_are_those_of_the_caller() -> None:
    own = Streams({GPU, OTHER, torch.device("cpu")})
    tensors: Any = [OnGpu(GPU), OnGpu(GPU)]
    assert not own.take(tensors)  # which says nothing of the other device
    assert not own.take([torch.zeros(2, device="cpu")])
    with own.enter():
        assert [x.name for x in Stream.current.values()] == ["main 0", "main 1"]
    assert Streams({GPU}).take(tensors)
    assert Stream.notes == []


def test_streams_of_the_caller_wait_for_others_and_keep_memory() -> None:
    """A forward pass on a stream of its own has a backward pass there."""
    own = Streams({GPU, OTHER})
    with Stream(GPU, "side"):
        tensors: Any = [OnGpu(GPU), OnGpu(GPU), OnGpu(OTHER)]
        assert not own.take(tensors)
        assert Stream.notes == [("waits for", "main 0", "side"), *[("kept for", "main 0")] * 2]
        with own.enter():
            assert [x.name for x in Stream.current.values()] == ["main 0", "main 1"]
        assert [x.name for x in Stream.current.values()] == ["side", "main 1"]


def test_threads_of_autograd_use_the_streams_of_the_caller() -> None:
    """On all devices: a thread of another device adds to results, too."""
    with Stream(OTHER, "side"):
        own = Streams({GPU, OTHER})
    with own.enter():
        assert [x.name for x in Stream.current.values()] == ["main 0", "side"]
    assert [x.name for x in Stream.current.values()] == ["main 0", "main 1"]


def told(current: Pass, call: Any) -> threading.Thread:
    """A thread that tells the receiver of a pass something."""
    shown = torch.zeros(1, device="cpu")
    thread = threading.Thread(target=current.tell, args=(lambda _: call(), shown))
    thread.start()
    return thread


def test_one_thing_at_a_time() -> None:
    """What arrives meanwhile is told by the thread that tells something, and nobody waits."""
    current, order = Pass(Channel()), []
    current._streams = Streams({GPU})
    is_running, may_end = threading.Event(), threading.Event()

    def first() -> None:
        is_running.set()
        assert may_end.wait(60)
        order.append("first")

    one = told(current, first)
    assert is_running.wait(60)
    for name in ("second", "third"):
        other = told(current, lambda name=name: order.append(name))
        other.join(60)
        assert not other.is_alive()
    assert order == []
    may_end.set()
    one.join(60)
    assert order == ["first", "second", "third"]


def test_nothing_is_told_after_an_error() -> None:
    """The pass raises the error at its end."""
    x = torch.zeros(2, requires_grad=True)
    told_of: list[Tensor] = []
    current = Pass(Channel(), lambda *_: None)

    def fail(_: object) -> None:
        current.tell(lambda _: 1 // 0, x.detach())
        current.tell(told_of.append, x.detach())

    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda *_: fail(_))
    with pytest.raises(ZeroDivisionError):
        current.differentiate(y, [x], torch.ones(2))
    assert told_of == []
