"""The sum of one layer's experts, made launch after launch, in the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.device_ops import DeviceOps
from strata.backends.hybrid.experts_host import ExpertCall
from strata.backends.hybrid.kernel_set import ExpertGroup
from strata.device.base import Buffer


class Resident(NamedTuple):
    """An expert and where its record lies on the device, when the stream gets there."""

    index: int  # type: ignore[assignment]  # the field's word, as in ExpertId
    record: Buffer


class ExpertGroups:
    """`out`: f32 [rows, hidden], complete after `finish`."""

    def __init__(self, ops: DeviceOps, call: ExpertCall) -> None:
        self._ops = ops
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
        """Add the host's share, f32 [rows, hidden] in pinned memory."""
        ops, hidden = self._ops, self._call.hidden
        target = self.out if self._empty else ops.new_matrix(hidden.rows, hidden.cols, "host's share")
        ops.device.copy(target.buffer, share, ops.memory.compute, "host's share")
        if not self._empty:
            ops.add(self.out, target)
        self._empty = False

    def finish(self) -> Matrix:
        """The sum; of nothing it is zero."""
        if self._empty:
            self._ops.device.fill(self.out.buffer, 0, self._ops.memory.compute)
        return self.out
