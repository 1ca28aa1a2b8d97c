"""A stand-in for NVIDIA's management library: functions that fill what ctypes points them at."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


class FakeNvml:
    """One RTX 3090 with an idle link. Fields may be changed; a number of None is "not supported"."""

    def __init__(self) -> None:
        self.init_status, self.count, self.open = 0, 1, 0
        self.driver, self.name, self.pci = "550.54.14", "NVIDIA GeForce RTX 3090", "00000000:82:00.0"
        self.compute, self.memory = (8, 6), (24 * GIB, 23 * GIB)
        self.numbers: dict[str, int | None] = {
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMemoryBusWidth": 384,
            "nvmlDeviceGetNumGpuCores": 10496,
        }
        self.clocks = {1: 2100, 2: 9751}

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += self.init_status == 0
        return self.init_status

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:  # noqa: N802
        assert size.value == len(buffer) and self.open == 1
        buffer.value = self.driver.encode()
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 1000 + index.value
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:  # noqa: N802
        assert handle.value == 1000
        buffer.value = self.name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free = self.memory
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:  # noqa: N802
        pci._obj.name = self.pci.encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self.compute
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, clock: Any) -> int:  # noqa: N802
        clock._obj.value = self.clocks[kind.value]
        return 0

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("numbers", {}):
            raise AttributeError(name)

        def number(handle: Any, value: Any) -> int:
            found = self.numbers[name]
            value._obj.value = 0 if found is None else found
            return 3 if found is None else 0

        return number
