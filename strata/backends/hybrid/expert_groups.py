"""The sum of one layer's experts, made launch after launch, in the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.device_ops import DeviceOps
from strata.backends.hybrid.experts_host import ExpertCall
from strata.backends.hybrid.kernel_set import ExpertGroup, SumInto
from strata.device.base import Buffer, Work
from strata.plan.speeds import Speeds


class Resident(NamedTuple):
    """An expert and where its record lies on the device, when the stream gets there."""

    index: int  # type: ignore[assignment]  # the field's word, as in ExpertId
    record: Buffer


class Branch(NamedTuple):
    """What a layer's experts are for: residual += scale * (their sum + shared). shared: the output of the
    expert that all rows use."""

    residual: Matrix
    scale: float
    shared: Matrix | None


class ExpertGroups:
    """The sum of experts, f32 [rows, hidden]: a matrix of its own, or (branch) on its way to the residual,
    which the last group on the device joins by itself."""

    def __init__(self, ops: DeviceOps, call: ExpertCall, speeds: Speeds, branch: Branch | None) -> None:
        self._ops = ops
        self._bus_factor = speeds.device_read / speeds.to_device
        self._call = call
        self._branch = branch
        self._rest = None if branch is None else branch.shared  # what nobody has added yet
        self._sum: Matrix | None = None

    def run(self, residents: Sequence[Resident], last: bool = False) -> None:
        """Add experts that are on the device, ascending, in one go. last: no others will be added."""
        if not residents:
            return
        call, ops = self._call, self._ops
        indices = [resident.index for resident in residents]
        group = ExpertGroup(
            layout=call.bank.layout,
            gating=call.gating,
            count=call.bank.count,
            experts=indices,
            records=[resident.record for resident in residents],
            ids=call.ids,
            weights=call.weights,
            pairs=call.pairs(indices),
            pinned=ops.memory.uploads.pinned,
        )
        into = self._into(last)
        with ops.memory.workspace.scope() as scratch:
            ops.launch(ops.kernels.experts(call.hidden, call.routes, group, into, scratch))

    def _into(self, last: bool) -> SumInto:
        """The residual for the last group, with all that was summed before; else the sum."""
        rest, self._rest = self._rest, None
        if last and self._branch is not None:
            before, self._sum = self._sum, None
            # What a sum of its own holds includes the shared expert already.
            return SumInto(self._branch.residual, True, self._branch.scale, before or rest)
        if self._sum is not None:
            return SumInto(self._sum, True)
        self._sum = self._new_sum()
        return SumInto(self._sum, False, 1.0, rest)

    def join(self, share: Buffer) -> None:
        """Add the host's share, f32 [rows, hidden] in pinned memory.

        The kernel reads it over the bus. A copy would wait behind all experts that are crossing: those of the
        next layer are queued already.
        """
        ops, rows = self._ops, self._call.hidden
        target, scale = (self.finish(), 1.0) if self._branch is None else self._branch[:2]
        for launch in ops.kernels.add(target, Matrix(share, rows.rows, rows.cols), scale):
            ops.launch([replace(launch, work=self._over_the_bus(launch.work, share.nbytes))])

    def _over_the_bus(self, work: Work, nbytes: int) -> Work:
        """The work of a kernel that reads `nbytes` of it at the bus's speed, not its memory's."""
        return Work(int(work.nbytes + nbytes * (self._bus_factor - 1)), work.macs)

    def finish(self) -> Matrix:
        """The residual or the sum, complete; of nothing it is zero."""
        if self._branch is None:
            if self._sum is None:
                self._sum = self._new_sum()
                self._ops.device.fill(self._sum.buffer, 0, self._ops.memory.compute)
            return self._sum
        residual, scale, _ = self._branch
        for part in (self._sum, self._rest):
            if part is not None:
                self._ops.add(residual, part, scale)
        self._sum = self._rest = None
        return residual

    def _new_sum(self) -> Matrix:
        hidden = self._call.hidden
        return self._ops.new_matrix(hidden.rows, hidden.cols, "experts")
