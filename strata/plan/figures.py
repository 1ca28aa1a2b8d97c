"""From a HardwareProfile to the figures of its device: what emulated devices and simulated lanes run at."""

from __future__ import annotations

from strata.device.figures import DeviceFigures, LinkFigures
from strata.errors import HardwareError
from strata.hardware.profile import HardwareProfile
from strata.plan.cost import COPY_SECONDS, LAUNCH_SECONDS
from strata.plan.device import DRIVER_BYTES
from strata.plan.speeds import DEVICE_MACS_SHARE, DEVICE_READ_SHARE

ONE_COPY_SECONDS = 2e-6
"""Of each further copy of a batch; assumed."""
CALL_SECONDS = 2e-6
"""Host time of one call of the driver; assumed."""
PAGEABLE_SHARE = 1 / 3
"""Of the link's speed when memory is not page-locked: the driver stages it; assumed."""
COPY_SHARE = 0.2
"""Of a node's read speed for one thread that copies: it reads, and writes with a read before it; assumed."""


def device_figures(machine: HardwareProfile) -> DeviceFigures:
    """The device of a machine, with the cost model's shares of its datasheet and the cost model's delays.

    memory_bytes is what the driver leaves. Raises HardwareError for a machine without a device.
    """
    device = machine.device
    if device is None:
        raise HardwareError(
            f"{machine.name} has no graphics card", remedy="choose a profile with one: --hardware NAME|FILE"
        )
    ways = (
        LinkFigures(way.value, ONE_COPY_SECONDS, COPY_SECONDS) for way in (device.to_device, device.to_host)
    )
    h2d, d2h = ways
    nodes = {node.index: rate.value for node, rate in zip(machine.nodes, machine.node_read, strict=True)}
    home = machine.nodes[0].index if device.node is None else device.node
    return DeviceFigures(
        memory_bytes=device.memory - DRIVER_BYTES,
        h2d=h2d,
        d2h=d2h,
        pageable_bytes_per_s=PAGEABLE_SHARE * min(device.to_device.value, device.to_host.value),
        memory_bytes_per_s=DEVICE_READ_SHARE * device.read.value,
        macs_per_s=DEVICE_MACS_SHARE * device.macs.value,
        kernel_latency_s=LAUNCH_SECONDS,
        call_s=CALL_SECONDS,
        host_copy_bytes_per_s=COPY_SHARE * nodes[home],
    )
