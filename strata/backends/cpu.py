"""The CPU backend: numpy arrays (f32, C-contiguous), C++ ops of `strata._C`.

Weights stay where they are (normally the mapped shard): a handle keeps a view. With activations "int8"
(default) linear ops on quantized weights quantize their input to int8 with one scale per 64 (formats of
group 32: 32) columns; with "int8_per_token" those on w8 but the head with one per row of the input (W8A8: it
multiplies the finished integer sums together with the weights' scale); with "f32", and always for bf16 and
f16 weights, the arithmetic is f32.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends import isa
from strata.backends.base import KV_DTYPES, Activations
from strata.backends.cpu_tiered import TieredOps
from strata.hardware.cpu import CpuChoice, choose_cpus, topology
from strata.store.formats import FORMATS

F32 = NDArray[np.float32]
_PACKED_OPS = ("weight", "embedding", "linear", "head_linear", "ffn", "experts")


class CpuBackend(TieredOps):
    """See `base.Backend` for what each op does."""

    name = "cpu"
    most_best = 256  # of more, what a thread keeps of its columns is a sort of its own

    def __init__(
        self,
        threads: int | None = None,
        activations: Activations = "int8",
        cpus: Sequence[int] | None = None,
        isa_name: str | None = None,
        chosen: CpuChoice | None = None,
    ) -> None:
        """threads: None = one per allowed physical core. cpus: where they may run. isa_name: forces one.

        chosen: what somebody (the plan) decided already, instead of threads and cpus.
        """
        super().__init__()
        extension = isa.extension()
        chosen = chosen or choose_cpus(threads, cpus)
        for text in chosen.warnings:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.activations = activations
        self.exact = activations == "f32"
        self.chosen_cpus = chosen
        self.ops = extension
        # Before anything compiled for AVX2 is called.
        name = isa.choose_isa(extension.features(), isa_name)
        self.cpu = extension.Cpu(list(chosen.cpus), name, chosen.bind, nodes=list(chosen.teams))
        self.cpu.token_scales = activations == "int8_per_token"
        # Threads of every node read every page: spread, a page is near for as many of them as possible.
        self.nodes = _nodes_of(chosen) if chosen.nodes is None else chosen.nodes

    def supports(self, op: str, fmt: str) -> bool:
        """Every packed op with every weight format, attention with every KV dtype."""
        if op in ("kv_cache", "attention"):
            return fmt in KV_DTYPES
        return op in _PACKED_OPS and fmt in FORMATS

    def vector(self, values: NDArray[Any]) -> F32:
        """An f32 copy, C-contiguous."""
        return np.array(values, dtype=np.float32, order="C")

    def take_rows(self, x: F32, rows: NDArray[np.int32]) -> F32:
        """x[rows]."""
        return x[rows]

    def split(self, x: F32, sizes: Sequence[int]) -> list[F32]:
        """Contiguous column slices."""
        ends = accumulate(sizes)  # ten times cheaper than numpy's for three numbers
        return [np.ascontiguousarray(x[:, end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def join_heads(self, parts: Sequence[F32], heads: int) -> F32:
        """Head h of the result is head h of every part, one after the other."""
        rows = len(parts[0])
        return np.concatenate([part.reshape(rows, heads, -1) for part in parts], axis=2).reshape(rows, -1)

    def split_heads(self, x: F32, heads: int, sizes: Sequence[int]) -> list[F32]:
        """Inverse of join_heads."""
        ends = accumulate(sizes)
        by_head = x.reshape(len(x), heads, -1)
        parts = [by_head[:, :, end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [np.ascontiguousarray(part).reshape(len(x), -1) for part in parts]

    def to_numpy(self, x: F32) -> F32:
        """x itself."""
        return x


def _nodes_of(chosen: CpuChoice) -> tuple[int, ...]:
    """Memory nodes that the threads are on; () where the machine has one."""
    nodes = topology().nodes
    used = tuple(node.index for node in nodes if set(node.cpus) & set(chosen.cpus))
    return used if len(nodes) > 1 else ()
