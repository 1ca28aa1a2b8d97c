"""A router's choice on its way to the host: the one wait of a layer that cannot be avoided."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.hybrid.arrays import DeviceRoutes, Matrix
from strata.device.base import Copy, Device, Stream

F32 = NDArray[np.float32]


class ReadRoutes(NamedTuple):
    """ids i32 and weights f32 `[rows, top_k]` are copies; hidden f32 `[rows, cols]` is pinned memory, valid
    until the next `start`; None when it was not asked for."""

    ids: NDArray[np.int32]
    weights: F32
    hidden: F32 | None


class Readback:
    """Copies on the compute stream: the bus to the host is hardly used, and nothing else is to be ordered."""

    def __init__(self, device: Device, compute: Stream, rows: int, hidden: int, top_k: int) -> None:
        self._device = device
        self._compute = compute
        self._hidden = device.host_alloc(rows * hidden * 4, "hidden rows")
        self._ids = device.host_alloc(rows * top_k * 4, "expert ids")
        self._weights = device.host_alloc(rows * top_k * 4, "expert weights")
        self._arrived = device.event()
        self._started: tuple[Matrix | None, DeviceRoutes] | None = None

    def start(self, routes: DeviceRoutes, hidden: Matrix | None) -> None:
        """Launch the copies; ops that come next on the stream do not hold them up."""
        ids, weights = routes.ids.buffer, routes.weights.buffer
        copies = [
            Copy(self._ids.slice(0, ids.nbytes), ids),
            Copy(self._weights.slice(0, weights.nbytes), weights),
        ]
        if hidden is not None:
            copies.append(Copy(self._hidden.slice(0, hidden.buffer.nbytes), hidden.buffer))
        self._device.copy_batch(copies, self._compute, "routes")
        self._device.record(self._arrived, self._compute)
        self._started = hidden, routes

    def finish(self) -> ReadRoutes:
        """Wait for what was started. Everything launched before it has run, then."""
        self._device.sync(self._arrived)
        return self._take()

    def finish_if_there(self) -> ReadRoutes | None:
        """What was started, or None when it would have to be waited for."""
        return self._take() if self._device.query(self._arrived) else None

    def _take(self) -> ReadRoutes:
        assert self._started is not None, "nothing was started"
        hidden, routes = self._started
        self._started = None
        shape, read = routes.ids.shape, self._device.host_read
        nbytes = routes.ids.buffer.nbytes
        ids = read(self._ids.slice(0, nbytes)).view(np.int32).reshape(shape).copy()
        weights = read(self._weights.slice(0, nbytes)).view(np.float32).reshape(shape).copy()
        if hidden is None:
            return ReadRoutes(ids, weights, None)
        rows = read(self._hidden.slice(0, hidden.buffer.nbytes)).view(np.float32)
        return ReadRoutes(ids, weights, rows.reshape(hidden.shape))
