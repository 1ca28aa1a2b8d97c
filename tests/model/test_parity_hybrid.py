"""The hybrid backend on an emulated device against the cpu backend, for every architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import parity
import pytest
import small_models
from device_figures import ROUND

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.options import HybridOptions
from strata.device.emulated import EmulatedDevice
from strata.memory.locked_pieces import LockOptions
from strata.plan.speeds import Speeds
from strata.store.options import ConvertOptions
from strata.store.reader import Store

W4 = ConvertOptions(experts="w4g64", shared="w4g64", head="w8", embed="w8")
SPEEDS = Speeds(1e9, 1e9, 1e9, device_read=1e9, device_macs=1e9, to_device=1e9, to_host=1e9)
# The same products, experts added up in another order (measured: 1e-6 where logits have a deviation of 8).
BOUND = 1e-4


def hybrid(cpu: CpuBackend, store: Store, seed: int) -> HybridBackend:
    """With three slots for all experts: whatever can happen to an expert does."""
    spec = store.spec
    records = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    options = HybridOptions(
        slots=3,
        slot_bytes=max(records, default=1),
        speeds=SPEEDS,
        rows=32,
        logit_rows=32,
        blocks=16,
        stream_experts=2,
        prefetch=0.0,
        locks=LockOptions(None),
        simulated=SPEEDS,
    )
    device = EmulatedDevice(replace(ROUND, memory_bytes=64 << 20), seed=seed)
    return HybridBackend(device, HostKernels(cpu), cpu, spec, options)


@pytest.mark.parametrize("case", small_models.CASES)
def test_logits_are_those_of_the_cpu_backend(case: str, tmp_path: Path) -> None:
    small_models.save(case, tmp_path / "hf")
    store = parity.to_store(tmp_path / "hf", tmp_path / "store", W4)
    ids, cpu = parity.tokens(small_models.VOCAB), CpuBackend(threads=1, activations="f32")
    wanted = parity.strata_logits(store, cpu, ids, [parity.PROMPT])
    backend = hybrid(cpu, store, seed=len(case))
    found = parity.strata_logits(store, backend, ids, [parity.PROMPT])
    assert np.abs(found - wanted).max() < BOUND
    backend.check_integrity()
    backend.close()
    backend.device.close()
