"""Speed of the routed experts on random weights of Qwen3-30B-A3B's layer shape.

    python scripts/bench_experts.py [--isa avx2] [--tokens 1] [--threads 2] [--seconds 5]

One token: GB/s of weights beside the bandwidth that our own probe measured between the rounds, for both
flip between states on virtual machines. Many tokens: GMAC/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from strata.backends.cpu import CpuBackend
from strata.backends.parts import ExpertBank, Gating
from strata.hardware.bandwidth import read_bandwidth
from strata.store.formats import FORMATS, ExpertLayout

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
ROUND_STEPS = 10


@dataclass(frozen=True)
class Model:
    """Layers of random experts: records u8 [layers, experts, record_bytes]."""

    layout: ExpertLayout
    records: NDArray[np.uint8]

    def banks(self) -> Iterator[ExpertBank]:
        """One bank per layer."""
        for layer, records in enumerate(self.records):
            yield ExpertBank(layer, EXPERTS, self.layout, records.__getitem__)


def random_model(fmt: str, layers: int) -> Model:
    """Random codes with small scales: any bytes are valid codes, only the scales must be finite."""
    layout = ExpertLayout(FORMATS[fmt], FORMATS[fmt], HIDDEN, WIDTH, 1, False)
    rng = np.random.default_rng(0)
    one = rng.integers(0, 256, layout.record_bytes, dtype=np.uint8)
    for offset, shape in ((layout.gate_up_offset(0), layout.gate_up), (layout.down_offset(0), layout.down)):
        blocks = one[offset : offset + shape.nbytes].reshape(shape.blocks, shape.block_bytes)
        if shape.format.scale_bytes == 2:
            scales = np.full(shape.scale_block_bytes // 2, 0.01, np.float16).view(np.uint8)
            blocks[:, shape.value_bytes : shape.value_bytes + len(scales)] = scales
    return Model(layout, np.tile(one, (layers, EXPERTS, 1)))


def step(backend: CpuBackend, model: Model, tokens: int, rng: np.random.Generator) -> tuple[float, int]:
    """Seconds and bytes of weights of one pass over all layers, every token routed anew in each."""
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
    seconds, used = 0.0, 0
    for bank in model.banks():
        ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        start = time.perf_counter()
        backend.experts(x, ids, weights, bank, Gating())
        seconds += time.perf_counter() - start
        used += len(np.unique(ids)) * model.layout.payload_bytes
    return seconds, used


def main() -> None:
    """Prints one line per round and the medians."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--format", default="w4g64", choices=sorted(FORMATS))
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    backend = CpuBackend(threads=options.threads, isa_name=options.isa)
    model = random_model(options.format, options.layers)
    rng = np.random.default_rng(1)
    shares, speeds, macs = [], [], []
    stop = time.perf_counter() + options.seconds
    while time.perf_counter() < stop:
        limit = read_bandwidth(backend.cpu, 0.1)
        count = ROUND_STEPS if options.tokens < 64 else 1
        steps = [step(backend, model, options.tokens, rng) for _ in range(count)]
        speed = median(used / seconds for seconds, used in steps)
        work = options.layers * options.tokens * TOP_K * 3 * HIDDEN * WIDTH
        shares.append(speed / limit.best)
        speeds.append(speed / 1e9)
        macs.append(median(work / seconds for seconds, _ in steps) / 1e9)
        print(f"probe {limit.best / 1e9:6.1f} GB/s  experts {speeds[-1]:6.1f} GB/s  {macs[-1]:6.1f} GMAC/s")
    print(
        f"{backend.cpu.isa} {options.format} {backend.cpu.threads} threads, {options.tokens} tokens: "
        f"{median(speeds):.1f} GB/s = {100 * median(shares):.0f} % of the probe; {median(macs):.1f} GMAC/s"
    )


if __name__ == "__main__":
    main()
