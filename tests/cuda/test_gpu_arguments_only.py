"""The loader for a GPU against a stand-in for cupy: it has never met a real one."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.backends.cuda.kernels import NULL, GpuLoader
from strata.device.base import ByValue, Launch, Work
from strata.device.buffers import Allocation


class FakeCupy:
    """Remembers what was loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.calls: list[Any] = []
        self.cuda = SimpleNamespace(ExternalStream=self._stream)

    def RawModule(self, path: str) -> Any:  # noqa: N802
        self.loaded.append(path)
        return SimpleNamespace(get_function=lambda name: _Function(self, name))

    def _stream(self, handle: int) -> Any:
        from contextlib import nullcontext

        self.calls.append(("stream", handle))
        return nullcontext()


class _Function:
    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self.cupy, self.name = cupy, name
        self.max_dynamic_shared_size_bytes = 0

    def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
        self.cupy.calls.append(
            (self.name, grid, block, arguments, shared_mem, self.max_dynamic_shared_size_bytes)
        )


def test_a_launch_gets_scalars_of_the_right_size(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("nvidia") is None:
        pytest.skip("the wheel nvidia-cuda-nvrtc-cu12 is not installed")
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    loader = GpuLoader("sm_86")
    kernel = loader.kernel("add", "add")
    loader.kernel("add", "add")
    buffer = Allocation(1 << 40, 64, "device", "x").whole()
    launch = Launch(
        kernel, (), (), Work(), (buffer, NULL, 7, 0.5, ByValue(bytes(range(12)))), (3, 1, 1), (256, 1, 1), 128
    )
    kernel.run(launch, 99)
    assert len(cupy.loaded) == 1 and cupy.loaded[0].endswith(".cubin")
    stream, (name, grid, block, arguments, shared, most) = cupy.calls
    assert stream == ("stream", 99) and (name, grid, block, shared) == ("add", (3, 1, 1), (256, 1, 1), 128)
    *arguments, struct = arguments
    assert (struct.size, struct.itemsize, struct.tobytes()) == (1, 12, bytes(range(12)))
    assert [type(value) for value in arguments] == [np.uint64, np.uint64, np.int32, np.float32]
    assert [int(value) for value in arguments[:3]] == [1 << 40, 0, 7] and most == 99 << 10
