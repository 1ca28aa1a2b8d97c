"""Attention of the host's kernel set: the CPU backend's, over the pages that a launch names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata.backends.cpu import CpuBackend
from strata.backends.cpu_kv import CpuKvCache
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import KvPlaces, work_of
from strata.backends.parts import AttentionCall
from strata.core import Batch
from strata.device.base import Buffer, Launch
from strata.device.buffers import Bytes, bytes_at
from strata.device.python_kernel import PythonKernel, Views

F32 = NDArray[np.float32]


class HostAttention:
    """See `KernelSet.attention`."""

    def __init__(self, cpu: CpuBackend) -> None:
        self._backend = cpu

    def launch(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix | None,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
    ) -> Launch:
        """Reads the pages that the batch's tokens see and writes those that its new tokens lie in."""
        given = {"q": q, "k": k, "v": v, "sinks": sinks}
        inputs = {name: matrix for name, matrix in given.items() if matrix is not None}
        blocks = [list(of_sequence) for of_sequence in places.blocks()]
        pages = list(dict.fromkeys(block for of_sequence in blocks for block in of_sequence))

        def compute(reads: Views, writes: Views) -> None:
            arrays = {name: _f32(view, inputs[name]) for name, view in zip(inputs, reads, strict=False)}
            cache = self._cache(places, reads[len(inputs) : len(inputs) + len(pages)])
            numbers = {block: index for index, block in enumerate(pages)}
            batch = _renumbered(places.batch, [[numbers[b] for b in blocks_of] for blocks_of in blocks])
            flat = arrays["sinks"][0] if sinks is not None else None
            local = replace(call, layer=0, sinks=flat)
            mixed = self._backend.attention(arrays["q"], arrays["k"], arrays.get("v"), cache, batch, local)
            _f32(writes[0], out)[:] = mixed

        ranges = (*(matrix.buffer for matrix in inputs.values()), *pages, places.table)
        writes = (out.buffer, *_written(places, blocks))
        spec = places.cache.spec
        seen = sum(s.count * (s.start + s.count) for s in places.batch.sequences)
        macs = seen * call.heads * (spec.key_dim + spec.value_dim)
        return Launch(PythonKernel("attention", compute), ranges, writes, work_of(ranges, writes, macs))

    def _cache(self, places: KvPlaces, views: Views) -> CpuKvCache:
        """A cache of one layer whose page i is views[i]."""
        spec = replace(places.cache.spec, layers=1)
        addresses = np.array([view.ctypes.data for view in views], np.int64)
        first, last = int(addresses.min()), int(addresses.max()) + spec.layer_bytes
        memory: Bytes = bytes_at(first, last - first)
        return CpuKvCache(self._backend.ops, spec, memory, addresses - first, "device memory")


def _renumbered(batch: Batch, numbers: list[list[int]]) -> Batch:
    sequences = zip(batch.sequences, numbers, strict=True)
    return replace(batch, sequences=tuple(replace(s, pages=np.array(n, np.int32)) for s, n in sequences))


def _written(places: KvPlaces, blocks: list[list[Buffer]]) -> list[Buffer]:
    """Blocks that take new tokens."""
    size = places.cache.spec.page_tokens
    ends = [(s.start // size, -(-(s.start + s.count) // size)) for s in places.batch.sequences]
    return [block for of, (first, end) in zip(blocks, ends, strict=True) for block in of[first:end]]


def _f32(view: Bytes, matrix: Matrix) -> F32:
    return view.view(np.float32).reshape(matrix.rows, matrix.cols)
