"""The host's side of experts: the CPU's share of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.arrays import DeviceRoutes, Matrix
from strata.backends.parts import ExpertBank, Gating
from strata.device.base import Buffer, Device
from strata.plan.speeds import Speeds

F32 = NDArray[np.float32]


class ExpertCall(NamedTuple):
    """Rows and their experts, on both sides. hidden_rows: the rows in pinned memory, None where they were not
    read back. decoding: the rows whose experts the cache learns from (bool [rows])."""

    hidden: Matrix
    hidden_rows: F32 | None
    routes: DeviceRoutes
    ids: NDArray[np.int32]
    weights: F32
    bank: ExpertBank
    gating: Gating
    decoding: NDArray[np.bool_]

    def pairs(self, experts: Sequence[int]) -> int:
        """How many (row, choice) pairs name one of the experts."""
        return int(np.isin(self.ids, experts).sum())


class HostShare:
    """Experts that the CPU computes while the device works. The result goes up through pinned memory."""

    def __init__(
        self, device: Device, cpu: CpuBackend, rows: int, hidden: int, simulated: Speeds | None
    ) -> None:
        self._device = device
        self._cpu = cpu
        self._result = device.host_alloc(rows * hidden * 4, "host's share")
        self._simulated = simulated

    def compute(self, call: ExpertCall, experts: Sequence[int]) -> tuple[Buffer, float]:
        """The sum over `experts` (ascending) in pinned memory, f32 [rows, hidden], and the seconds it took.

        The last result must have been read: the host knows that once it has read back a later routing.
        """
        assert call.hidden_rows is not None, "rows that the host computes with are read back"
        start = self._device.now()
        result = self._cpu.experts(
            call.hidden_rows, call.ids, call.weights, call.bank, call.gating, active=experts
        )
        if self._simulated is not None:
            seconds = host_seconds(self._simulated, call.bank, len(experts), call.pairs(experts))
            self._device.host_work({"host": seconds}, f"layer {call.bank.layer}")
        seconds = self._device.now() - start
        target = self._result.slice(0, result.nbytes)
        self._device.host_write(target).view(np.float32)[:] = result.reshape(-1)
        return target, seconds


def expert_macs(bank: ExpertBank) -> int:
    """Multiply-adds of one expert for one token."""
    layout = bank.layout
    sizes = layout.gate_up.rows * layout.gate_up.cols + layout.down.rows * layout.down.cols
    return layout.slices * sizes


def host_seconds(speeds: Speeds, bank: ExpertBank, experts: int, pairs: int) -> float:
    """What so many experts for so many (row, choice) pairs take on the host, by plan."""
    read = experts * bank.layout.record_bytes / speeds.host_read
    return max(read, pairs * expert_macs(bank) / speeds.host_macs)
