"""Hybrid backends over an emulated device, and what they are compared with, for tests on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from device_figures import ROUND
from numpy.typing import NDArray
from tiny_model import VOCAB, TinyStore

from strata.backends.base import Backend, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.kernel_set import KernelSet
from strata.backends.hybrid.options import HybridOptions
from strata.core import Batch, ExpertId, KvDtype
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_memory import POISON, bytes_of
from strata.memory.policies import POLICIES
from strata.memory.policies.base import Policy
from strata.memory.transfers import TransferOptions
from strata.model.decoder import Decoder
from strata.model.loading import WeightStore
from strata.plan.spec import ModelSpec
from strata.plan.speeds import Speeds

F32 = NDArray[np.float32]
FIGURES = replace(ROUND, memory_bytes=64 << 20)
# The speeds of FIGURES, and a host that reads as fast as its bus: nothing is decided beforehand.
SPEEDS = Speeds(1e9, 1e9, 1e9, device_read=1e9, device_macs=1e9, to_device=1e9, to_host=1e9)
PAGE_TOKENS = 8


def options(store: WeightStore, spec: ModelSpec, **changes: Any) -> HybridOptions:
    layouts = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    base = HybridOptions(
        slots=5,
        slot_bytes=max(layouts, default=256),
        speeds=SPEEDS,
        rows=32,
        logit_rows=32,
        blocks=64,
        stream_experts=2,
        transfers=TransferOptions(staging_bytes=8192, speculative_bytes=8192),
        simulated=SPEEDS,
    )
    return replace(base, **changes)


class CachedStore(TinyStore):
    """Makes every tensor once: a thousand backends are built over one store."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain: dict[str, NDArray[np.float32]] = {}
        self._all = super()._shapes()

    def plain(self, name: str) -> NDArray[np.float32]:
        if name not in self._plain:
            self._plain[name] = super().plain(name)
        return self._plain[name]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._all if hasattr(self, "_all") else super()._shapes()


class Poisoner:
    """Wraps a policy: a slot is overwritten the moment its expert is evicted, whoever still reads it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend: HybridBackend | None = None
        self.evicted = 0

    def __call__(self, *args: Any) -> Policy:
        inner = POLICIES[self.name](*args)
        evict = inner.on_evict

        def poisoned(expert: ExpertId) -> None:
            assert self.backend is not None
            place = self.backend.cache.slot_of(expert)
            if place is not None:
                self.evicted += 1
                bytes_of(self.backend.memory.region.slot(place))[:] = POISON
            evict(expert)

        inner.on_evict = poisoned  # type: ignore[method-assign]
        return inner


@dataclass
class Hybrid:
    """One backend with its device and decoder, and one sequence that is fed tokens."""

    backend: HybridBackend
    device: Any
    decoder: Decoder
    kv: Any
    pages: NDArray[np.int32]
    done: int = 0
    poisoner: Poisoner | None = None

    def feed(self, ids: list[int], logits: bool = True) -> F32 | None:
        batch = one_sequence(ids, self.done, self.pages, logits)
        self.done += len(ids)
        found = self.decoder.forward(batch, self.kv)
        return None if found is None else self.backend.to_numpy(found).copy()

    def close(self) -> None:
        self.backend.check_integrity()
        self.device.check_integrity()
        self.backend.close()
        self.device.close()


def make_hybrid(
    cpu: CpuBackend,
    store: WeightStore,
    spec: ModelSpec,
    *,
    seed: int | None = None,
    device: Any = None,
    kv_dtype: KvDtype = "f32",
    policy: str = "lru",
    pages: int = 8,
    page_tokens: int = PAGE_TOKENS,
    kernels: KernelSet | None = None,
    **changes: Any,
) -> Hybrid:
    device = device or EmulatedDevice(FIGURES, seed=seed)
    poisoner = Poisoner(policy)
    asked = options(store, spec, **{"policy": poisoner, **changes})
    backend = HybridBackend(device, kernels or HostKernels(cpu), cpu, spec, asked)
    poisoner.backend = backend
    decoder = Decoder(spec, store, backend)
    kv = backend.kv_cache(KvSpec.of(spec, page_tokens, kv_dtype), pages)
    table = np.arange(pages, dtype=np.int32)[::-1].copy()
    return Hybrid(backend, device, decoder, kv, table, poisoner=poisoner)


@dataclass
class Plain:
    """The same on another backend."""

    backend: Backend
    decoder: Decoder
    kv: Any
    pages: NDArray[np.int32]
    done: int = 0

    @classmethod
    def make(
        cls,
        backend: Backend,
        store: WeightStore,
        spec: ModelSpec,
        kv_dtype: KvDtype = "f32",
        page_tokens: int = PAGE_TOKENS,
    ) -> Plain:
        kv = backend.kv_cache(KvSpec.of(spec, page_tokens, kv_dtype), 8)
        return cls(backend, Decoder(spec, store, backend), kv, np.arange(8, dtype=np.int32))

    def feed(self, ids: list[int]) -> F32:
        batch = one_sequence(ids, self.done, self.pages, True)
        self.done += len(ids)
        return self.backend.to_numpy(self.decoder.forward(batch, self.kv)).copy()


def feed_chunks(model: Hybrid | Plain, chunks: Sequence[int]) -> F32:
    """Logits of a fixed random text, fed in chunks of these sizes."""
    ids = tokens(sum(chunks))
    return np.concatenate([model.feed(ids[model.done : model.done + size]) for size in chunks])


def one_sequence(ids: list[int], start: int, pages: NDArray[np.int32], logits: bool) -> Batch:
    rows = np.arange(len(ids), dtype=np.int32)
    wanted = rows if logits else rows[:0]
    return Batch.single(np.array(ids, np.int32), rows + np.int32(start), pages, wanted)


def tokens(count: int, seed: int = 3, vocab: int = VOCAB) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
    return found
