"""Figures for tests of the emulated device."""

from __future__ import annotations

from strata.device.figures import DeviceFigures, LinkFigures

# An RTX 3090 in a PCIe 3.0 x16 slot. Link and memory speeds: docs/design.md, section 1. macs_per_s: half of
# the 71 TFLOPS (FP16 with FP32 accumulation, dense) of NVIDIA's GA102 whitepaper. Delays and the host's
# copy speed are assumptions: nothing here was measured on hardware.
RTX_3090 = DeviceFigures(
    memory_bytes=24 << 30,
    h2d=LinkFigures(bytes_per_s=12e9, latency_s=2e-6, handshake_s=8e-6),
    d2h=LinkFigures(bytes_per_s=12e9, latency_s=2e-6, handshake_s=8e-6),
    pageable_bytes_per_s=4e9,
    memory_bytes_per_s=900e9,
    macs_per_s=35.5e12,
    kernel_latency_s=5e-6,
    call_s=2e-6,
    host_copy_bytes_per_s=8e9,
)

# Round numbers, so that a test's sums can be made in the head: 1 byte per nanosecond everywhere.
ROUND = DeviceFigures(
    memory_bytes=1 << 20,
    h2d=LinkFigures(bytes_per_s=1e9, latency_s=1e-6, handshake_s=10e-6),
    d2h=LinkFigures(bytes_per_s=1e9, latency_s=1e-6, handshake_s=10e-6),
    pageable_bytes_per_s=0.5e9,
    memory_bytes_per_s=1e9,
    macs_per_s=1e9,
    kernel_latency_s=5e-6,
    call_s=0.0,
    host_copy_bytes_per_s=1e9,
)
