"""From a store on disk to an engine that is ready: what `strata run` and the server call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from strata.backends.base import Backend, KvDtype, KvSpec
from strata.engine.engine import Engine, EngineOptions
from strata.hardware.host_memory import available_bytes
from strata.model.decoder import Decoder
from strata.plan.kv import KvNeed, KvSize, auto_budget
from strata.plan.kv import kv_size as plan_kv_size
from strata.plan.spec import ModelSpec
from strata.store.reader import Store

BackendName = Literal["cpu", "reference"]
Activations = Literal["int8", "f32"]


def load_engine(
    store_path: str | Path,
    *,
    backend: BackendName = "cpu",
    threads: int | None = None,
    activations: Activations = "int8",
    context: int | None = None,
    kv_dtype: KvDtype = "int8",
    kv_bytes: int | None = None,
    page_tokens: int = 32,
    chunk: int = 512,
    sequences: int = 1,
    valid_tokens: int | None = None,
    share_prefixes: bool = True,
    wrap: Callable[[Backend], Backend] | None = None,
) -> Engine:
    """Open a store and put an engine over it; weights are read from disk when first needed.

    context None: what the model was made for, as far as the KV cache's memory goes. kv_bytes None: half
    of the free memory at most, less where the weights need it. sequences: requests that can fill the context
    at the same time. valid_tokens: ids of the tokenizer; None = all rows of the vocabulary. threads None: one
    per core, for the reference one. share_prefixes: see EngineOptions. wrap: puts something before the
    backend, such as a clock.
    Raises StoreError, ConfigError (a context the model cannot have), CapacityError (memory).
    """
    store = Store.open(store_path)
    spec = store.spec
    weights = sum(file.bytes for file in store.manifest.files)
    size = kv_size(spec, KvSpec.of(spec, page_tokens, kv_dtype), context, kv_bytes, sequences, weights)
    options = EngineOptions(
        context=size.context,
        pages=size.pages,
        valid_tokens=spec.vocab if valid_tokens is None else min(valid_tokens, spec.vocab),
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        chunk=chunk,
        share_prefixes=share_prefixes,
    )
    made = make_backend(backend, threads, activations)
    return Engine(Decoder(spec, store, wrap(made) if wrap else made), options)


def make_backend(name: BackendName, threads: int | None, activations: Activations) -> Backend:
    """The backend of that name. Only the reference imports torch, which takes seconds."""
    if name == "reference":
        from strata.backends.reference import ReferenceBackend

        # Its ops are small: on a busy machine torch's barriers made two threads 10 times slower than one.
        return ReferenceBackend(threads=threads or 1)
    from strata.backends.cpu import CpuBackend

    return CpuBackend(threads, activations)


def kv_size(
    spec: ModelSpec,
    kv: KvSpec,
    context: int | None,
    kv_bytes: int | None,
    sequences: int,
    weights: int = 0,
) -> KvSize:
    """Context and pages that fit the memory. weights: bytes that should stay in memory beside the KV cache.

    Raises as `plan.kv.kv_size`.
    """
    budget = auto_budget(available_bytes(), weights) if kv_bytes is None else kv_bytes
    need = KvNeed(spec.name, spec.context, kv.page_tokens, kv.page_bytes)
    return plan_kv_size(need, context, budget, sequences)
