"""Sequences in KV pages, as attention's cases need them, and what attention makes of them in f64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kv_pages import Parts, layer_bytes, meaning, parts_of, random_parts
from runners import Pointers, read_only

from strata.backends.base import KvSpec

LAYER = 1


@dataclass(frozen=True)
class FilledPages:
    """Pages in any order in memory: `table` has a sequence's from first_page[sequence] on.

    keys, values: f64 `[kv_heads, tokens, dim]` per sequence. Behind its last token a page holds NaN.
    """

    spec: KvSpec
    table: Pointers
    reached: tuple[np.ndarray, ...]
    first_page: list[int]
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def layer_at(self) -> int:
        """Bytes from a page's beginning to the layer that the cases look at."""
        return LAYER * self.spec.layer_bytes

    def attention(
        self, query: np.ndarray, sequence: int, head: int, end: int, window: int, sink: float | None
    ) -> np.ndarray:
        """Scores, softmax and values of one query (times the scale) that sees tokens before `end`."""
        keys, values = self.visible(sequence, head, end, window)
        powers = np.exp(keys @ query)
        return powers @ values / (powers.sum() + (0.0 if sink is None else np.exp(sink)))

    def visible(self, sequence: int, head: int, end: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values that a query sees."""
        begin = max(0, end - window) if window else 0
        return self.keys[sequence][head, begin:end], self.values[sequence][head, begin:end]


def fill(spec: KvSpec, lengths: Sequence[int], rng: np.random.Generator) -> FilledPages:
    counts = [-(-length // spec.page_tokens) for length in lengths]
    first = [int(n) for n in np.cumsum([0, *counts[:-1]])]
    parts = [random_parts(spec, rng) for _ in range(sum(counts))]
    pages = [np.full(spec.page_bytes, 0xFF, np.uint8) for _ in parts]
    for page, part in zip(pages, parts, strict=True):
        page[LAYER * spec.layer_bytes :] = layer_bytes(spec, part)
    for start, length in zip(first, lengths, strict=True):
        if length % spec.page_tokens:
            _forget(spec, pages[start + length // spec.page_tokens], length % spec.page_tokens)
    order = rng.permutation(len(pages))
    table = Pointers(tuple(int(np.flatnonzero(order == i)[0]) for i in range(len(pages))))
    keys, values = [], []
    for start, count in zip(first, counts, strict=True):
        own = parts[start : start + count]
        keys.append(np.concatenate([meaning(p.keys, p.key_scales, spec.group) for p in own], axis=1))
        values.append(np.concatenate([meaning(p.values, p.value_scales, spec.group) for p in own], axis=1))
        if spec.value_in_key:
            values[-1] = keys[-1][..., : spec.value_dim]
    return FilledPages(spec, table, tuple(read_only(pages[i]) for i in order), first, keys, values)


def _forget(spec: KvSpec, page: np.ndarray, used: int) -> None:
    """The tokens that nothing wrote hold NaN (0xff bytes), scales included."""
    block = page[LAYER * spec.layer_bytes :]
    parts = parts_of(spec, block.copy())
    arrays = [array.copy() for array in (parts.keys, parts.values, parts.key_scales, parts.value_scales)]
    for codes in arrays[:2]:
        codes[:, used:] = -1 if codes.dtype == np.int8 else 0xFFFF
    for scales in arrays[2:]:
        scales[..., used:] = np.nan
    block[:] = layer_bytes(spec, Parts(*arrays))


def attended(
    pages: FilledPages,
    chunks: Sequence[tuple[int, int]],
    queries: np.ndarray,
    window: int,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """f64 `[rows, heads, value_dim]`. chunks: (first position, tokens) of each sequence; queries: scaled."""
    ends = [(i, start + k + 1) for i, (start, count) in enumerate(chunks) for k in range(count)]
    heads = queries.shape[1]
    expected = np.empty((len(ends), heads, pages.spec.value_dim))
    for row, (sequence, end) in enumerate(ends):
        for head in range(heads):
            kv_head, sink = head * pages.spec.kv_heads // heads, None if sinks is None else float(sinks[head])
            expected[row, head] = pages.attention(queries[row, head], sequence, kv_head, end, window, sink)
    return expected


def turns_bytes(spec: KvSpec, end: int, begin: int) -> int:
    """Keys, values and scales of one KV head, in whole turns of 16 tokens."""
    element = 1 if spec.storage == "int8" else 2
    width = (spec.key_dim + (0 if spec.value_in_key else spec.value_dim)) * element
    scales = 4 * spec.scales(spec.key_dim) + (0 if spec.value_in_key else 4 * spec.scales(spec.value_dim))
    return (-(-end // 16) - begin // 16) * 16 * (width + scales)
