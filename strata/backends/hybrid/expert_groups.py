"""The sum of one layer's experts, made launch after launch, in the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.device_ops import DeviceOps
from strata.backends.hybrid.experts_host import ExpertCall
from strata.backends.hybrid.kernel_set import ExpertGroup
from strata.device.base import Buffer, Work
from strata.plan.cost import Speeds


class Resident(NamedTuple):
    """An expert and where its record lies on the device, when the stream gets there."""

    index: int  # type: ignore[assignment]  # the field's word, as in ExpertId
    record: Buffer


class ExpertGroups:
    """`out`: f32 [rows, hidden], complete after `finish`."""

    def __init__(self, ops: DeviceOps, call: ExpertCall, speeds: Speeds) -> None:
        self._ops = ops
        self._bus_factor = speeds.device_read / speeds.to_device
        self._call = call
        self._empty = True
        self.out = ops.new_matrix(call.hidden.rows, call.hidden.cols, "experts")

    def run(self, residents: Sequence[Resident]) -> None:
        """Add experts that are on the device, ascending, in one launch."""
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
        with ops.memory.workspace.scope() as scratch:
            ops.launch(ops.kernels.experts(call.hidden, call.routes, group, self.out, self._empty, scratch))
        self._empty = False

    def join(self, share: Buffer) -> None:
        """Add the host's share, f32 [rows, hidden] in pinned memory.

        The kernel reads it over the bus. A copy would wait behind all experts that are crossing: those of the
        next layer are queued already.
        """
        ops, out = self._ops, self.out
        self.finish()
        for launch in ops.kernels.add(out, Matrix(share, out.rows, out.cols), 1.0):
            ops.launch([replace(launch, work=self._over_the_bus(launch.work, share.nbytes))])

    def _over_the_bus(self, work: Work, nbytes: int) -> Work:
        """The work of a kernel that reads `nbytes` of it at the bus's speed, not its memory's."""
        return Work(int(work.nbytes + nbytes * (self._bus_factor - 1)), work.macs)

    def finish(self) -> Matrix:
        """The sum; of nothing it is zero."""
        if self._empty:
            self._ops.device.fill(self.out.buffer, 0, self._ops.memory.compute)
            self._empty = False
        return self.out
