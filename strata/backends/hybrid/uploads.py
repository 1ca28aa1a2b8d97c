"""The way up: weights once, and the small tables and rows of every pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.hybrid.arrays import HybridWeight, Matrix, PackedOnDevice, Vector
from strata.device.base import Buffer, Copy, Device, Stream
from strata.device.buffers import flat_bytes
from strata.memory.regions import Arena
from strata.memory.transfer import Priority
from strata.memory.transfers import TransferQueue


class StaticWeights:
    """Brings a weight to the device when it is first used; it stays there. Owns no memory but the arena's."""

    def __init__(self, device: Device, arena: Arena, queue: TransferQueue, compute: Stream) -> None:
        self._device = device
        self._arena = arena
        self._queue = queue
        self._compute = compute

    def packed(self, weight: HybridWeight) -> PackedOnDevice:
        """A packed matrix on the device."""
        if weight.buffer is None:
            weight.buffer = self._upload(weight.tensor.data, weight.tensor.name)
        return PackedOnDevice(weight.buffer, weight.shape)

    def matrix(self, vector: Vector) -> Matrix:
        """A plain vector `[1, n]` or matrix on the device."""
        if vector.matrix is None:
            rows, cols = np.atleast_2d(vector.values).shape
            vector.matrix = Matrix(self._upload(vector.values, "a plain weight"), rows, cols)
        return vector.matrix

    def matrix_if(self, vector: Vector | None) -> Matrix | None:
        """The same for a part that a model may not have."""
        return None if vector is None else self.matrix(vector)

    def _upload(self, values: NDArray[Any], name: str) -> Buffer:
        """Through the staging buffers: the host's half is done when this returns, so `values` may go."""
        target = self._arena.take(values.nbytes, name)
        source = self._device.host_pageable(flat_bytes(values), name)
        transfer = self._queue.submit([Copy(target, source)], Priority.NOW, self._queue.layer)
        self._queue.wait(self._compute, transfer)
        self._device.free(source)
        return target


class Uploads:
    """What the host makes for one pass: rows and tables that are copied up, and tables that kernels read from
    pinned memory (8 bytes for each expert: a copy of their own would wait behind every expert on the bus).

    Nothing is written twice in a pass; `begin` waits for the kernels of the last one.
    """

    def __init__(self, device: Device, compute: Stream, nbytes: int) -> None:
        self._device = device
        self._compute = compute
        pinned = device.host_alloc(nbytes, "inputs")
        self._arena = Arena("pinned inputs", pinned, "lower engine.prefill_chunk or the number of requests")
        self._last_use = device.event()
        self._in_use = False

    def begin(self) -> None:
        """A new pass: what the last one put here is forgotten once the device has read it."""
        if self._in_use:  # the last pass failed halfway
            self.end()
        if self._last_use.recorded:
            self._device.sync(self._last_use)
        self._arena.used = 0

    def end(self) -> None:
        """The last op that reads this pass's memory was launched."""
        self._device.record(self._last_use, self._compute)
        self._in_use = False

    def pinned(self, values: NDArray[Any], what: str) -> Buffer:
        """A copy of `values` in pinned memory, for kernels to read."""
        self._in_use = True
        buffer = self._arena.take(values.nbytes, what)
        self._device.host_write(buffer)[:] = flat_bytes(values)
        return buffer

    def matrix(self, values: NDArray[Any], workspace: Arena, what: str) -> Matrix:
        """A copy of `[rows, cols]` numbers of 4 bytes in device memory, on the compute stream."""
        source = self.pinned(np.ascontiguousarray(values), what)
        target = workspace.take(values.nbytes, what)
        self._device.copy(target, source, self._compute, what)
        return Matrix(target, *values.shape)
