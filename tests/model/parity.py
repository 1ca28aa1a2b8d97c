"""The whole way from a checkpoint to logits, and transformers' logits to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strata.backends.base import Backend, KvSpec
from strata.core import Batch, Sequence
from strata.model.decoder import Decoder
from strata.model.resolve import resolve
from strata.store.checkpoint import open_checkpoint
from strata.store.convert import convert
from strata.store.options import ConvertOptions
from strata.store.reader import Store

Logits = NDArray[np.float32]
PROMPT, STEPS = 24, 20
PAGE_TOKENS = 16
EXACT = ConvertOptions(experts="bf16", shared="bf16", head="bf16", embed="bf16")


def tokens(vocab: int) -> list[int]:
    """A fixed random prompt with its continuation."""
    ids: list[int] = np.random.default_rng(7).integers(3, vocab, PROMPT + STEPS).tolist()
    return ids


def transformers_logits(model: Any, ids: list[int]) -> Logits:
    """Logits of every position in one pass without a cache, f32 `[tokens, vocab]`."""
    with torch.no_grad():
        logits: Logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def to_store(checkpoint: Path, out: Path, options: ConvertOptions = EXACT) -> Store:
    """Open, resolve, convert and open again."""
    source = open_checkpoint(checkpoint)
    resolved = resolve(source.config, source.tensors, source.kind)
    convert(source, resolved.spec, resolved.targets, resolved.experts, out, options)
    return Store.open(out)


class Session:
    """One request over a decoder, its pages scattered so that a page table is needed."""

    def __init__(self, store: Store, backend: Backend, context: int) -> None:
        pages = -(-context // PAGE_TOKENS)
        self.decoder = Decoder(store.spec, store, backend)
        self.cache = backend.kv_cache(KvSpec.of(store.spec, PAGE_TOKENS, "f32"), pages)
        self.pages = np.arange(pages, dtype=np.int32)[::-1].copy()
        self.done = 0

    def feed(self, ids: list[int]) -> Logits:
        """Logits `[len(ids), vocab]` after each of the next tokens."""
        rows = np.arange(len(ids), dtype=np.int32)
        sequence = Sequence(0, len(ids), self.done, self.pages)
        batch = Batch(np.array(ids, np.int32), rows + np.int32(self.done), (sequence,), rows)
        self.done += len(ids)
        return self.decoder.backend.to_numpy(self.decoder.forward(batch, self.cache)).copy()


def strata_logits(store: Store, backend: Backend, ids: list[int], chunks: list[int]) -> Logits:
    """Prefill in `chunks`, then one token at a time; logits of every position."""
    session = Session(store, backend, len(ids))
    parts, start = [], 0
    for size in [*chunks, *[1] * (len(ids) - sum(chunks))]:
        parts.append(session.feed(ids[start : start + size]))
        start += size
    return np.concatenate(parts)
