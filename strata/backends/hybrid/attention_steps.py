"""Attention from the joint projection of queries, keys and values, one op after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import HeadColumns, KernelSet, KvPlaces, Projections
from strata.backends.parts import AttentionCall
from strata.device.base import Launch
from strata.memory.regions import Arena


def attention_in_steps(
    kernels: KernelSet,
    projections: Projections,
    places: KvPlaces,
    call: AttentionCall,
    sinks: Matrix | None,
    out: Matrix,
    scratch: Arena,
) -> Iterator[Launch]:
    """`KernelSet.attention_of` for a set, or a model, that has nothing better."""
    spec, tables, eps = projections.spec, projections.tables, projections.eps
    qkv, head = projections.qkv, spec.head_dim
    counts = (spec.heads, spec.kv_heads, spec.kv_heads)
    parts, first = [], 0
    for count in counts:
        size = count * head
        part = Matrix(scratch.take(qkv.rows * size * 4, "queries, keys or values"), qkv.rows, size)
        source, target = HeadColumns(qkv.cols, first), HeadColumns(size, 0)
        yield from kernels.copy_heads(qkv, source, part, target, 1, size)
        parts.append(part)
        first += size
    q, k, v = parts
    yield from kernels.prepare_heads(q, spec.heads, tables, spec, projections.q_norm, eps)
    yield from kernels.prepare_heads(k, spec.kv_heads, tables, spec, projections.k_norm, eps)
    if spec.clip_qkv is not None:
        unturned = replace(spec, rope=replace(spec.rope, rotary_dim=0))
        yield from kernels.prepare_heads(v, spec.kv_heads, None, unturned, None, eps)
    yield from kernels.attention(q, k, v, places, call, sinks, out, scratch)
