"""A kernel's case through the device layer: on a GPU, or on the emulated device, by the same code.

Arrays are copied into device memory with a red zone on either side, which must be as it was afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from runners import RED_ZONE, Call, Words, made_arrays, read_only, resolved

from strata.backends.cuda.kernels import NULL, KernelLoader
from strata.device.base import Buffer, ByValue, Device, Launch

ZONE = 0xA5


class DeviceRunner:
    """Runs calls one by one; see `EmulatedRunner` for how a call is told."""

    def __init__(self, device: Device, loader: KernelLoader) -> None:
        self._device = device
        self._loader = loader
        self._stream = device.stream("kernel tests")

    def run(self, call: Call) -> None:
        """Outputs are in the call's arrays afterwards. AssertionError when a red zone was written."""
        arrays: list[Any] = [*call.arguments, *call.reached]
        placed = {i: _Placed(self._device, a) for i, a in enumerate(arrays) if isinstance(a, np.ndarray)}
        values = resolved(call, lambda index: placed[index].inside.address)
        for index in made_arrays(call, values):
            placed[index] = _Placed(self._device, read_only(values[index]))
        for one in placed.values():
            one.copy_in(self._stream)
        self._device.launch(self._launch(call, placed, values), self._stream)
        for one in placed.values():
            one.copy_out(self._stream)
        self._device.sync(self._stream)
        for one in placed.values():
            one.finish()

    def _launch(self, call: Call, placed: dict[int, _Placed], values: list[Any]) -> Launch:
        buffers = [one.inside for one in placed.values()]
        written = [one.inside for one in placed.values() if one.array.flags.writeable]
        grid = (*call.grid, 1, 1)[:3]
        operands = tuple(
            placed[i].inside if i in placed else _by_value(value) for i, value in enumerate(values)
        )[: len(call.arguments)]
        kernel = self._loader.kernel(call.file, call.entry)
        return Launch(
            kernel,
            tuple(buffers),
            tuple(written),
            arguments=operands,  # type: ignore[arg-type]
            grid=grid,  # type: ignore[arg-type]
            block=(call.block, 1, 1),
            shared_bytes=call.shared_bytes,
        )


def _by_value(value: Any) -> Any:
    if isinstance(value, Words):
        return ByValue(value.values.tobytes())
    return NULL if value is None else value


class _Placed:
    """An array's copy in device memory, between red zones, and its pinned mirror."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self.array = array
        self._device = device
        nbytes = array.nbytes + 2 * RED_ZONE
        self._whole = device.alloc(nbytes, "kernel test")
        self._mirror = device.host_alloc(nbytes, "kernel test")
        self.inside: Buffer = self._whole.slice(RED_ZONE, array.nbytes)

    def copy_in(self, stream: Any) -> None:
        image = self._device.host_write(self._mirror)
        image[:] = ZONE
        image[RED_ZONE : RED_ZONE + self.array.nbytes] = self.array.reshape(-1).view(np.uint8)
        self._device.copy(self._whole, self._mirror, stream)

    def copy_out(self, stream: Any) -> None:
        self._device.copy(self._mirror, self._whole, stream)

    def finish(self) -> None:
        image = np.array(self._device.host_read(self._mirror))
        self._device.free(self._whole)
        self._device.free(self._mirror)
        end = RED_ZONE + self.array.nbytes
        assert (image[:RED_ZONE] == ZONE).all() and (image[end:] == ZONE).all(), "a red zone was written"
        found = image[RED_ZONE:end]
        if self.array.flags.writeable:
            self.array.reshape(-1).view(np.uint8)[:] = found
        else:
            assert np.array_equal(found, self.array.reshape(-1).view(np.uint8)), "an input was written"
