"""Places: where the samples lie in each use, remembered, or sought where the calls are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from autogram._blocks import Folded, Layout, Routed, agree
from autogram._capture.objectives import Objectives
from autogram._capture.owners import Scales
from autogram._capture.probe import Layouts, find_layouts, fitting_layouts
from autogram._capture.recording import Channel, Recording
from autogram._capture.tail import Tail
from autogram._capture.use import Use, describe
from autogram._errors import MixedSamplesError, NonFiniteError

K = TypeVar("K")
T = TypeVar("T")
Key = tuple[int, tuple[int, ...], int | None, int]
Structure = tuple[int, int | None, int]

# How many signatures of forward passes to remember layouts for. Batches of varying length have one
# each; a forgotten one costs two backward passes through the activations.
REMEMBERED = 512


class UnknownLayoutError(Exception):
    """It is not known where the samples of a use lie.

    Attributes:
        use: The use.
        is_needed: Whether it has a cotangent, so that a layout must be found.
    """

    def __init__(self, use: Use, *, is_needed: bool) -> None:
        super().__init__(use.function)
        self.use = use
        self.is_needed = is_needed


class Places:
    """What an engine remembers of layouts, refusals and structures. It holds no tensor of a pass.

    Args:
        channel: The channel of the engine's taps.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.layouts: dict[Key, Layouts] = {}
        self.mixed: dict[Key, str] = {}
        self.structures: dict[Structure, None] = {}
        self._calls = 0

    def search(self, objectives: Objectives, tail: Tail) -> Search:
        """The search of one call."""
        # Values can couple samples where no shape changes (a margin that is exceeded, a mixing
        # weight). Another look at the calls 2, 4, 8, ... costs nothing on average.
        self._calls += 1
        is_due = self._calls > 1 and self._calls.bit_count() == 1
        return Search(self, objectives, tail, is_due)

    def refuse(self, objectives: Objectives, tail: Tail, reason: str) -> None:
        """Remembers that the samples of the recordings that are alive are mixed."""
        for recording in self.channel.recordings:
            self.remember(self.mixed, key_of(recording, objectives, tail), reason)

    def remember(self, memory: dict[K, T], key: K, value: T) -> None:
        """Adds an entry to a memory, in the place of the oldest if it is full."""
        memory.pop(key, None)
        memory[key] = value
        # The passes of one graph must all fit, or they would push each other out without end.
        if len(memory) > max(REMEMBERED, len(self.channel.recordings)):
            del memory[next(iter(memory))]


class Search:
    """The layouts of one call: what is remembered, and what is found on the way.

    Where the calls are known and their values or shapes are new, one pass by scales comes first,
    and the pass that asks for layouts is what it is compared with (with several objectives for a
    sample, another one is). Else the samples are sought by zeros.

    Args:
        places: What is remembered.
        objectives: The losses with their samples.
        tail: What lies between the last taps and the losses.
        is_due: Whether to look again at what is remembered.

    Attributes:
        has_sought: Whether there was anything to seek.
    """

    def __init__(self, places: Places, objectives: Objectives, tail: Tail, is_due: bool) -> None:
        self._places = places
        self._objectives = objectives
        self._tail = tail
        self._is_due = is_due
        self._keys: dict[Recording, Key] = {}
        self._found: dict[Recording, Layouts] = {}
        self._scales: Scales | None = None
        self._measured: dict[Recording, Layouts] = {}
        self._needed: set[Use] = set()
        self.has_sought = False

    def layout(self, use: Use, cotangent: Tensor) -> Layout | None:
        """The layout of a use with this cotangent ``(k, *output)``, or ``None`` if that is zero.

        Raises:
            UnknownLayoutError: It must be sought first.
            MixedSamplesError: It is known that there is none.
        """
        if not cotangent.numel():
            return None  # an expert without tokens, say
        of_recording = self._known(use.recording)
        if of_recording is None and self._scales is not None:
            of_recording = self._measure(self._scales, use, cotangent[0])
        if of_recording is None:
            raise UnknownLayoutError(use, is_needed=False)
        layouts: Sequence[Layout] = of_recording.get(use.index, ())
        if len(layouts) == 1 and isinstance(layouts[0], Folded):
            return layouts[0]
        # It had no cotangent so far (a branch with weights of zero, say), or one that left several
        # layouts possible (at a single token, say). This one may tell more.
        has_cotangent = (cotangent != 0).any(0)
        if layouts and agree(layouts, has_cotangent):
            return layouts[0]
        if bool(has_cotangent.any()):
            raise UnknownLayoutError(use, is_needed=True)
        return None

    @property
    def is_settled(self) -> bool:
        """Whether the layout of every use is known, whatever its cotangent will be."""
        for recording in self._places.channel.recordings:
            layouts = self._known(recording) or {}
            for index in range(recording.count):
                found = layouts.get(index, ())
                if len(found) != 1 or isinstance(found[0], Routed):
                    return False
        return True

    def prepare(self) -> None:
        """Looks for the samples now, where a pass would only show that they must be sought.

        Raises:
            MixedSamplesError: It is known that they are mixed.
        """
        for use in self._tail.uses:
            if self._known(use.recording) is None:
                self.seek(UnknownLayoutError(use, is_needed=False))
                return

    def seek(self, unknown: UnknownLayoutError) -> None:
        """Looks for the samples, by passes of its own."""
        self.has_sought = True
        use, objectives = unknown.use, self._objectives
        if unknown.is_needed and use in self._needed:
            raise MixedSamplesError(
                f"{describe(use)} has a cotangent for single objectives where it has none for some "
                "of them together, so that it cannot be seen where the samples lie. Pass "
                "`batch_dim=None` to `Engine`."
            )
        is_known = self._structure(use.recording) in self._places.structures
        self._scales = None
        self._measured.clear()
        try:
            if unknown.is_needed or not is_known or not bool(objectives.is_finite.all()):
                self._needed.update([use] if unknown.is_needed else [])
                self._find(use, is_needed=unknown.is_needed, is_known=False)
            elif objectives.per_sample > 1:
                self._find(use, is_needed=False, is_known=True)
            else:
                self._scales = Scales(self._places.channel, objectives)
        except NonFiniteError:
            if self._key(use.recording) not in self._places.layouts:
                raise
            for recording in self._places.channel.recordings:
                self._found[recording] = self._places.layouts.get(self._key(recording), {})

    def finish(self) -> None:
        """Remembers what the pass has shown.

        Raises:
            UnknownLayoutError: It has not shown all of it.
        """
        if self._scales is None:
            return
        measured = self._measured.items()
        shown = {(recording, index) for recording, found in measured for index in found}
        for use in self._scales.uses:
            if use.recording not in self._found and (use.recording, use.index) not in shown:
                raise UnknownLayoutError(use, is_needed=True)  # all samples add up to zero
        self._remember(self._measured)

    def _known(self, recording: Recording) -> Layouts | None:
        """What is known of a recording without another look."""
        key = self._key(recording)
        if key in self._places.mixed:
            raise MixedSamplesError(self._places.mixed[key])
        if recording in self._found or self._is_due:
            return self._found.get(recording)
        return self._places.layouts.get(key)

    def _measure(self, scales: Scales, use: Use, cotangent: Tensor) -> Layouts:
        """The layouts that this pass and the one before show together, up to this use."""
        layouts = self._measured.setdefault(use.recording, {})
        if use.index not in layouts:
            owners = scales.owners(use, cotangent)
            if not owners:
                raise UnknownLayoutError(use, is_needed=True)
            layouts[use.index] = fitting_layouts(use, owners, self._objectives.is_finite)
        return layouts

    def _find(self, use: Use, *, is_needed: bool, is_known: bool) -> None:
        """Finds the layouts of all uses, and remembers them."""
        recording, objectives = use.recording, self._objectives
        wanted = use if is_needed else None
        try:
            found = find_layouts(self._places.channel, objectives, wanted, is_known=is_known)
        except MixedSamplesError as error:
            self._places.remember(self._places.mixed, self._key(recording), str(error))
            raise
        found = {recording: {}, **found}
        self._found.update(found)
        if bool(objectives.is_finite.all()):  # else true for this call alone
            self._places.remember(self._places.structures, self._structure(recording), None)
            self._remember(found)

    def _remember(self, found: Mapping[Recording, Layouts]) -> None:
        """Remembers regular layouts. Irregular ones are measured each time."""
        for recording, layouts in found.items():
            if any(isinstance(layout, Routed) for some in layouts.values() for layout in some):
                continue
            key = self._key(recording)
            known = self._places.layouts.get(key, {})
            self._places.remember(self._places.layouts, key, {**known, **layouts})

    def _key(self, recording: Recording) -> Key:
        """What the layouts of a recording may depend on."""
        key = self._keys.get(recording)
        if key is None:
            key = self._keys[recording] = key_of(recording, self._objectives, self._tail)
        return key

    def _structure(self, recording: Recording) -> Structure:
        """What a look at other values and shapes may rely on."""
        return recording.structure, self._objectives.batch_dim, self._tail.structure


def key_of(recording: Recording, objectives: Objectives, tail: Tail) -> Key:
    """What the layouts of a recording may depend on."""
    shape = tuple(objectives.losses.shape)
    return recording.signature, shape, objectives.batch_dim, tail.fingerprint
