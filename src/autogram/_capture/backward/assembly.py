"""One pass: takes in the blocks of uses as they arrive, and assembles columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from autogram._blocks import (
    Bundles,
    Columns,
    Factors,
    Folded,
    Placement,
    Region,
    Subset,
    gram_of_bundle,
    pieces,
    settings_now,
)
from autogram._capture.alone import Conditions, columns_of, contract_alone
from autogram._capture.autograd.cotangents import visit
from autogram._capture.backward.accounts import Account, Accounts
from autogram._capture.backward.run import Run, refuse_unconnected
from autogram._capture.backward.unseen import use_in_tail
from autogram._capture.derived import pull_back_factors
from autogram._capture.from_graph.showing import Showing
from autogram._capture.limit import retried
from autogram._capture.tracked import Tracked
from autogram._capture.uses import Contribution, RuleUse, Use, pull_back

# Small parts of the Gramian are added up together, larger ones one by one.
_MOST_IN_PARTS = 2**17

# Parameters with all of their columns.
Complete = list[tuple[Tensor, Columns]]


def assemble(run: Run) -> None:
    """Makes one pass past the taps, and gives a run the columns of all parameters."""
    is_read = run.channel.reads_graph
    assembly = visit(
        run.channel,
        run.objectives.losses,
        run.objectives.cotangents(),
        lambda: Assembly(run),
        retain_graph=run.retain_graph or not (run.layouts is None or run.layouts.is_certain),
        is_step=run.is_step,
        show=Showing(run.survey).differentiate if is_read else None,
    )
    assembly.complete()


class Assembly:
    """A receiver of cotangents, for one pass, that assembles the columns of each parameter.

    When all uses of a parameter have arrived, its columns are complete. They are then contracted,
    and dropped unless they are kept, so that few exist at a time. The survey tells the number of
    expected uses. If there may be others, all columns wait for the end of the pass.

    A verified pass contracts the same as any other pass. The check sees columns before they
    are dropped, or where they are kept.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._layouts = run, run.layouts
        self.limit, self.form = run.devices.limit, run.form
        self._accounts = Accounts(run, run.survey.uses)
        self._columns: dict[Tensor, Columns] = {}  # kept columns
        self._taken = 0  # elements of kept rows that are larger than factors
        self._rooms: dict[torch.device, int] = {}  # for such rows, when the pass began to keep any
        self._bundles = Bundles()
        self._parts: list[Tensor] = []  # parts of the Gramian, ``(m, m)``
        self._is_complete = not run.survey.may_hide_taps
        # Whether only the Gramian, and what a fused step keeps, is requested.
        is_bare = run.is_summed and run.summary is None and not run.sinks
        self._is_bare = is_bare and self._is_complete and run.layouts is not None
        run.unseen.clear()
        for each in (run.check, run.summary, *run.sinks):
            if each is not None:
                each.restart(run.objectives)
        if run.arena is not None:
            run.arena.restart()
        memory = None if run.arena is None else run.arena.take
        options = run.form, memory is None, settings_now()
        self._conditions = Conditions(run.devices, run.form, memory, options)
        has_tail = run.survey.leaves_of_tail and not run.channel.reads_graph
        tail = use_in_tail(run.survey) if has_tail else None
        self._has_arrivals = tail is not None
        if tail is not None:
            self._add(tail, run.objectives.layout, (), run.objectives.cotangents())

    def __call__(self, use: Use, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """Takes in one use."""
        self._has_arrivals = True
        if cotangent.numel():  # otherwise it has no sample, or no position
            layout = self._layouts.layout(use, cotangent) if self._layouts else None
            if isinstance(layout, Folded) and self._contract_alone(use, layout, saved, cotangent):
                return
            if layout is not None or self._layouts is None:
                self._add(use, layout, saved, cotangent)
                if not self._is_complete and self._run.channel.before_pass is not None:
                    self._pull_back_now(use)
        self._take(self._count(use.reads))

    def layouts_inside(self, uses: Sequence[Use]) -> dict[Use, Folded]:
        """The uses among some that a compiled part may contract itself, with their layouts.

        It may if only the Gramian, and what a fused step keeps, is requested, and if all other
        uses of the same tensors are among them.
        """
        if self._layouts is None or not self._is_bare or self._run.objectives.per_sample > 1:
            return {}
        layouts = {use: known for use in uses if (known := self._layouts.regular(use)) is not None}
        return {use: layouts[use] for use in self._accounts.closed(layouts)}

    def has_room(self, device: torch.device, elements: int) -> bool:
        """Whether there is room for so many more elements of rows that are larger than factors.

        Kernels are asked only once in a pass: on a GPU, they walk all statistics of its allocator.
        """
        if device not in self._rooms:
            self._rooms[device] = self._run.devices.on(device).room(device)
        return self._taken + elements <= self._rooms[device]

    def take_part(
        self,
        gramian: Tensor,
        uses: Iterable[Use],
        kept: Mapping[Tensor, Iterable[Factors]],
        taken: int,
    ) -> None:
        """Takes the Gramian of some uses that a compiled part has contracted itself.

        For gradients, factors of each parameter may be ``kept``. Among these are ``taken`` elements
        of rows that are larger than factors.
        """
        self._has_arrivals = True
        columns = {
            p: Columns.of(Region.of_parameter(p), self._run.devices.on(p.device), factors)
            for p, factors in kept.items()
        }
        self._columns.update(columns)
        if self._run.check is not None:
            for use in uses:
                self._run.check.see_use(use, gramian, is_hidden=self.form is None)
        self._taken += taken
        self._sum(gramian)

    def add(
        self, use: Use, layout: Placement | None, subset: Subset | None, found: Contribution
    ) -> None:
        """Adds a block to the columns of its tensor, and to the summary."""
        self._has_arrivals = True
        if self._run.summary is not None:
            self._run.summary.add(use, layout, subset, found)
        tracked, region, block = found
        columns = self._accounts[tracked].columns
        assert columns is not None
        columns.add(region, block, subset)

    def complete(self) -> None:
        """Takes columns that wait for other uses or for a bundle, and gives the run its results."""
        if not self._has_arrivals:
            refuse_unconnected()
        # Derived tensors come first: pulling them back may need accounts of parameters.
        for kind in (Tracked, Tensor):
            for account in [x for x in self._accounts.values() if isinstance(x.owner, kind)]:
                self._take(self._finish(account))
        run = self._run
        run.columns = self._columns
        if not run.is_summed:
            return
        for bundle in self._bundles.rest():
            self._sum(retried(self.limit, gram_of_bundle, bundle))
        losses = run.objectives.losses
        if self._parts:
            total = _together(self._parts)
        else:
            dtype = torch.promote_types(losses.dtype, torch.float32)
            total = losses.new_zeros(losses.numel(), losses.numel(), dtype=dtype)
        run.gramian = run.objectives.in_order(total, 0, 1)

    def _add(
        self, use: Use, layout: Placement | None, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> None:
        """Adds the blocks of a use to the columns of the tensors that it reads."""
        run = self._run
        if not use.is_seen:
            run.unseen.append(use)
        if run.check is not None:
            run.check.see_use(use, cotangent)
        is_plain = layout is None or isinstance(layout, Folded)
        parts = ((None, layout, cotangent),) if is_plain else pieces(layout, cotangent)
        for subset, within, part in parts:
            limit = self.limit
            for found in retried(limit, use.contributions, within, part, saved, limit):
                self.add(use, layout, subset, found)

    def _contract_alone(
        self, use: Use, layout: Folded, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> bool:
        """Contracts a use with a program, if there is one. No other use may read its tensors."""
        run = self._run
        if not self._is_bare or not isinstance(use, RuleUse) or run.channel.before_pass is not None:
            return False
        parameters = self._accounts.read_by(use, {use})
        if parameters is None:
            return False
        given = use, parameters, layout, (cotangent, *saved), self._conditions, self.has_room
        found = retried(self.limit, contract_alone, *given)
        if found is None:
            return False
        kept = {parameters[i]: of for i, of in found.columns.items()} if run.form else {}
        if (check := run.check) is not None:
            check.see_use(use, cotangent)
            if run.form is None:  # the program has not kept the columns
                each = retried(self.limit, columns_of, *given[:4], run.devices)
                for parameter, columns in each.items():
                    retried(self.limit, check.see_columns, parameter, columns)
        self._taken += found.taken
        self._columns.update(kept)
        for part in found.parts:
            self._sum(part)
        for i, form, elements in found.waiting:
            if bundle := self._bundles.put(found.columns[i], form, elements):
                self._sum(retried(self.limit, gram_of_bundle, bundle))
        return True

    def _count(self, owners: Iterable[Tensor | Tracked]) -> Complete:
        """Counts an arrival for each owner, and finishes accounts that expect no other."""
        complete: Complete = []
        for owner in owners:
            account = self._accounts[owner]
            account.expected -= 1
            if account.expected == 0 and self._is_complete:
                complete += self._finish(account)
        return complete

    def _finish(self, account: Account) -> Complete:
        """Closes an account, unless it is closed.

        Columns of a parameter are complete. Rows of a derived tensor are pulled back, and added to
        the columns of its parameters, which may complete some of these.
        """
        owner, columns, account.columns = account.owner, account.columns, None
        if columns is None:
            return []
        if isinstance(owner, Tensor):
            return [(owner, columns)]
        self._pull_back(owner, columns)
        return self._count(owner.sources)

    def _pull_back_now(self, use: Use) -> None:
        """Pulls rows back within the pass, for which sharded parameters are gathered.

        Otherwise rows would wait for the end of the pass, because further uses may arrive.
        """
        for tracked in dict.fromkeys(use.reads):
            account = self._accounts[tracked]
            owner, columns = account.owner, account.columns
            if isinstance(owner, Tracked) and columns is not None:
                kernels = self._run.devices.on(owner.device)
                account.columns = Columns(Region.contiguous(owner.shape), kernels)
                self._pull_back(owner, columns)

    def _pull_back(self, owner: Tracked, columns: Columns) -> None:
        """Pulls back a derived tensor's columns, and adds them to those of its parameters."""
        subset = columns.narrow()
        if any(columns.found()):  # otherwise nothing was added, or only blocks without elements
            channel, pulled = self._run.channel, None
            if channel.is_batchable:
                pulled = retried(self.limit, pull_back_factors, channel, owner, columns)
            if pulled is None:
                pulled = retried(self.limit, pull_back, channel, owner, columns.dense(), self.limit)
            for parameter, block in pulled:
                of_parameter = self._accounts[parameter].columns
                assert of_parameter is not None
                of_parameter.add(Region.of_parameter(parameter), block, subset)

    def _take(self, complete: Complete) -> None:
        """Takes all columns of some parameters, each of them once in a pass."""
        run = self._run
        for parameter, columns in complete:
            if run.summary is not None and columns.is_of_rows:
                run.summary.elements_of_rows += parameter.numel()
            if run.form is not None:
                given = run.form, self.has_room, self._conditions.memory
                self._taken += retried(self.limit, columns.keep, *given)
                self._columns[parameter] = columns
            elif run.check is not None:
                retried(self.limit, run.check.see_columns, parameter, columns)
            for sink in run.sinks:
                sink.take(parameter, columns)
        if run.is_summed:
            for bundle in self._bundles.add(*[columns for _, columns in complete]):
                self._sum(retried(self.limit, gram_of_bundle, bundle))

    def _sum(self, part: Tensor | None) -> None:
        """Adds a part of the Gramian, ``(m, m)`` or ``(k, b, k, b)``; ``None`` means zero."""
        if part is None:
            return
        parts, m = self._parts, self._run.objectives.losses.numel()
        flat = part if part.dim() == 2 else part.reshape(m, m)
        parts.append(flat.to(parts[0].device) if parts else flat)
        if len(parts) * flat.numel() > _MOST_IN_PARTS:
            self._parts = [_together(parts)]


def _together(parts: Sequence[Tensor]) -> Tensor:
    """The sum of some tensors of one shape."""
    if len(parts) > 2:
        return torch.stack(tuple(parts)).sum(0)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
