"""Attention over the paged KV cache in plain torch, one query token at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.backends.base import KvSpec
from strata.backends.parts import AttentionCall
from strata.core import Batch, Sequence


class PagedStates:
    """Keys (or values) of every layer, page and token: what was appended, rounded as the KV dtype asks.

    steps: of int8t, every layer's scale. The arrays are numpy's zeros, whose memory is not touched before it
    is used.
    """

    def __init__(
        self, spec: KvSpec, pages: int, dim: int, dtype: torch.dtype, steps: NDArray[np.float32]
    ) -> None:
        shape = (spec.layers, pages * spec.page_tokens, spec.kv_heads)
        self.page_tokens = spec.page_tokens
        self.dtype = dtype
        self.group = spec.group or dim
        self.scales: Tensor | None = None
        self.steps = torch.from_numpy(steps)
        if spec.storage == "int8":
            self.elements = _zeros((*shape, dim), torch.int8)
            self.scales = _zeros((*shape, -(-dim // self.group)), torch.float32)
        else:
            self.elements = _zeros((*shape, dim), torch.bfloat16 if spec.dtype == "bf16" else dtype)

    def append(self, layer: int, sequence: Sequence, states: Tensor) -> None:
        """Write `[count, kv_heads, dim]` at the sequence's positions."""
        where = self._places(sequence.pages, sequence.start, sequence.start + sequence.count)
        if self.scales is None:
            self.elements[layer, where] = states.to(self.elements.dtype)
            return
        groups, dim = self.scales.shape[3], states.shape[2]
        filled = torch.nn.functional.pad(states, (0, groups * self.group - dim))
        scales = filled.view(*states.shape[:2], groups, self.group).abs().amax(dim=3).to(torch.float32) / 127
        if len(self.steps):
            scales = self.steps[layer].expand(scales.shape)
        steps = self._spread(torch.where(scales > 0, scales, torch.ones_like(scales)), dim)
        self.elements[layer, where] = (states / steps).round().clamp(-127, 127).to(torch.int8)
        self.scales[layer, where] = scales

    def read(self, layer: int, pages: NDArray[np.int32], tokens: int) -> Tensor:
        """The first `tokens` tokens of a page table: `[tokens, kv_heads, dim]` in the backend's dtype."""
        where = self._places(pages, 0, tokens)
        states = self.elements[layer, where].to(self.dtype)
        if self.scales is None:
            return states
        return states * self._spread(self.scales[layer, where], states.shape[2])

    def _spread(self, scales: Tensor, dim: int) -> Tensor:
        """A scale for each of `dim` elements."""
        return scales.repeat_interleave(self.group, dim=2)[:, :, :dim]

    def copy_page(self, source: int, target: int) -> None:
        """Everything of one page to another."""
        n = self.page_tokens
        for states in (self.elements, self.scales):
            if states is not None:
                states[:, target * n : (target + 1) * n] = states[:, source * n : (source + 1) * n]

    def _places(self, pages: NDArray[np.int32], start: int, stop: int) -> Tensor:
        positions = np.arange(start, stop)
        places = pages[positions // self.page_tokens].astype(np.int64) * self.page_tokens
        return torch.from_numpy(places + positions % self.page_tokens)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), np.uint8)).view(dtype).squeeze(-1)


class PagedKv:
    """The KV cache of one model: keys, and values unless they are part of the keys (MLA).

    place: what memory it is, for the log.
    """

    place = "torch tensors"

    def __init__(self, spec: KvSpec, pages: int, dtype: torch.dtype) -> None:
        self.spec = spec
        of_keys, of_values = np.array(spec.steps, np.float32).reshape(-1, 2).T
        self.keys = PagedStates(spec, pages, spec.key_dim, dtype, of_keys)
        self.values = (
            None if spec.value_in_key else PagedStates(spec, pages, spec.value_dim, dtype, of_values)
        )

    def copy_page(self, source: int, target: int) -> None:
        """All layers of one page to another."""
        for states in (self.keys, self.values):
            if states is not None:
                states.copy_page(source, target)


def attention(
    q: Tensor, k: Tensor, v: Tensor | None, cache: PagedKv, batch: Batch, call: AttentionCall
) -> Tensor:
    """Append k and v, then causal attention of every row over its own request (see Backend.attention)."""
    spec = cache.spec
    queries = q.view(batch.rows, spec.kv_heads, call.heads // spec.kv_heads, spec.key_dim)
    output = q.new_empty(batch.rows, call.heads * spec.value_dim)
    for sequence in batch.sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        cache.keys.append(call.layer, sequence, k[rows].view(-1, spec.kv_heads, spec.key_dim))
        if cache.values is not None and v is not None:
            cache.values.append(call.layer, sequence, v[rows].view(-1, spec.kv_heads, spec.value_dim))
        output[rows] = _attend(queries[rows], cache, sequence, call)
    return output


def _attend(queries: Tensor, cache: PagedKv, sequence: Sequence, call: AttentionCall) -> Tensor:
    """One request's queries `[count, kv_heads, group, key_dim]` -> `[count, heads * value_dim]`."""
    stop = sequence.start + sequence.count
    keys = cache.keys.read(call.layer, sequence.pages, stop)
    if cache.values is None:
        values = keys[:, :, : cache.spec.value_dim]
    else:
        values = cache.values.read(call.layer, sequence.pages, stop)
    answers = []
    for query, last in zip(queries, range(sequence.start + 1, stop + 1), strict=True):
        first = max(0, last - call.window) if call.window else 0
        answers.append(_one_query(query.clone(), keys[first:last], values[first:last], call))
    return torch.stack(answers)


def _one_query(query: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
    """softmax(scale * q.k) v; query `[kv_heads, group, key_dim]`, keys `[tokens, kv_heads, key_dim]`.

    A sink is a score without a value: it only dilutes the others.
    """
    scores = torch.einsum("hgd,thd->hgt", query, keys) * call.scale
    if call.sinks is not None:
        sinks = call.sinks.view(*scores.shape[:2], 1)
        scores = torch.cat([scores, sinks], dim=2)
    shares = scores.softmax(dim=2)[:, :, : len(keys)]
    return torch.einsum("hgt,thd->hgd", shares, values).flatten()
