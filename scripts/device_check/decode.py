"""Decoding in the shape of Qwen3-30B-A3B: weights are made up, experts come and go through the cache."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_check.machine import machine, open_device
from device_check.stages import stage_main
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.options import HybridOptions
from strata.core import ExpertId, Request, SamplingParams
from strata.engine.engine import Engine, EngineOptions
from strata.hardware.cpu import choose_cpus
from strata.memory.expert_slots import Claim
from strata.memory.transfer import Priority
from strata.model.decoder import Decoder
from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec, RouterSpec
from strata.plan.speeds import speeds_of
from strata.store import names
from strata.store.formats import FORMATS, ExpertLayout, PackedShape, PackedTensor

LAYERS, TOKENS, PROMPT = 6, 64, 33
EXPERTS, SHARED, HEAD = "w4g64", "w4g128", "w8"


def qwen3_30b(layers: int, emulated: bool) -> ModelSpec:
    """Its config.json with fewer layers; the emulated one is a dwarf."""
    hidden, heads, kv_heads, dim = (128, 4, 1, 64) if emulated else (2048, 32, 4, 128)
    experts, top_k, width, vocab = (8, 2, 64, 512) if emulated else (128, 8, 768, 151_936)
    attention = AttentionSpec(heads, kv_heads, dim, dim**-0.5, RopeSpec("default", 1e6, dim), qk_norm="head")
    return ModelSpec(
        architecture="qwen3_moe",
        name="made up, in the shape of Qwen3-30B-A3B",
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        context=4096,
        norm_eps=1e-6,
        attention=attention,
        dense_width=3 * hidden,
        moe_layers=(True,) * layers,
        experts=ExpertSpec(RouterSpec(experts, top_k), width),
    )


class MadeUpStore:
    """A WeightStore in memory. Every record has bytes of its own, as a model's would: no cache may help."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.experts is not None
        self.spec = spec
        self._random = np.random.default_rng(1)
        size = self.expert_layout(0).record_bytes
        shape = (spec.layers, spec.experts.router.experts, size)
        # Small codes and small scales in every format: whatever is read as a number is finite.
        self._records = np.full(shape, 0x11, np.uint8)

    def has(self, name: str) -> bool:
        """What the architecture has."""
        return name in self._shapes()

    def tensor(self, name: str) -> PackedTensor:
        """A packed matrix."""
        fmt = HEAD if name in (names.EMBED, names.HEAD) else SHARED
        shape = PackedShape(FORMATS[fmt], *self._shapes()[name])
        return PackedTensor(name, shape, np.full(shape.nbytes, 0x11, np.uint8))

    def plain(self, name: str) -> NDArray[np.float32]:
        """Norms of ones; routers that choose many different experts."""
        shape = self._shapes()[name]
        if "norm" in name:
            return np.ones(shape, np.float32)
        return self._random.standard_normal(shape, np.float32)

    def expert_layout(self, layer: int) -> ExpertLayout:
        """Of every layer."""
        assert self.spec.experts is not None
        fmt = FORMATS[EXPERTS]
        return ExpertLayout(fmt, fmt, self.spec.hidden, self.spec.experts.width, 1, False)

    def expert(self, expert: ExpertId) -> NDArray[np.uint8]:
        """A record."""
        record: NDArray[np.uint8] = self._records[expert.layer, expert.index]
        return record

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        spec, a = self.spec, self.spec.attention
        assert spec.experts is not None
        shapes: dict[str, tuple[int, ...]] = {
            names.EMBED: (spec.vocab, spec.hidden),
            names.HEAD: (spec.vocab, spec.hidden),
            names.FINAL_NORM: (spec.hidden,),
        }
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (spec.hidden,),
            "attn.qkv.weight": ((a.heads + 2 * a.kv_heads) * a.head_dim, spec.hidden),
            "attn.q_norm.weight": (a.head_dim,),
            "attn.k_norm.weight": (a.head_dim,),
            "attn.out.weight": (spec.hidden, a.heads * a.head_dim),
            "ffn_norm.weight": (spec.hidden,),
            "router.weight": (spec.experts.router.experts, spec.hidden),
        }
        for layer in range(spec.layers):
            shapes |= {names.layer(layer, name): shape for name, shape in own.items()}
        return shapes


def decode(store: MadeUpStore, emulated: bool, slots: int, misses: Any) -> dict[str, Any]:
    """Tokens per second after the prompt, on the device's clock, and how experts were answered."""
    spec, hardware = store.spec, machine(emulated)
    speeds = speeds_of(hardware, {node.index: len(node.cpus) for node in hardware.nodes}, "interleave")
    device, kernels = open_device(emulated)
    layout = store.expert_layout(0)
    options = HybridOptions(
        slots,
        layout.record_bytes,
        speeds,
        misses,
        rows=64,
        logit_rows=1,
        blocks=64,
        stream_experts=2,
        inserts_per_step=None,
        simulated=speeds if emulated else None,
    )
    cpu = CpuBackend(chosen=choose_cpus())
    backend = HybridBackend(device, kernels, cpu, spec, options)
    engine = Engine(
        Decoder(spec, store, backend),
        EngineOptions(context=1024, pages=32, valid_tokens=spec.vocab, chunk=48, max_running=1),
    )
    tokens = 4 if emulated else TOKENS
    request = Request("a", list(range(PROMPT)), SamplingParams(temperature=1.0, seed=1, max_tokens=tokens))
    engine.add(request)
    while not request.generated:
        engine.step()
    _fill(backend)
    before, begin, wall = dataclasses.asdict(backend.flow.metrics), device.now(), time.monotonic()
    while engine.busy:
        engine.step()
    seconds, after = device.now() - begin, dataclasses.asdict(backend.flow.metrics)
    assert request.error is None, request.error
    flow = {name: after[name] - before[name] for name in after}
    backend.close()
    device.close()
    return {
        "tokens_per_second": (tokens - 1) / seconds,
        "milliseconds_per_layer": 1e3 * seconds / (tokens - 1) / spec.layers,
        "wall_seconds": time.monotonic() - wall,
        "experts": flow,
    }


def _fill(backend: HybridBackend) -> None:
    """Experts for every slot, before the time counts: what a cache holds after a while."""
    loader, queue = backend.loader, backend.memory.queue
    for layer in range(backend.spec.layers):
        for index in range(loader.source.bank(layer).count):
            claim = backend.cache.admit(ExpertId(layer, index))
            if isinstance(claim, Claim):
                loader.load(claim, Priority.NOW, queue.layer)
    queue.drain()
    loader.settle()


def run(emulated: bool) -> dict[str, Any]:
    """Every expert on the device; a quarter of them, misses fetched or computed by the processors."""
    layers = 2 if emulated else LAYERS
    store = MadeUpStore(qwen3_30b(layers, emulated))
    assert store.spec.experts is not None
    every = layers * store.spec.experts.router.experts
    few = every // 4
    scenes = (("every expert", every, "fetch"), ("fetched", few, "fetch"), ("auto", few, "auto"))
    result: dict[str, Any] = {"layers": layers, "model": store.spec.name, "problem": ""}
    for name, slots, misses in scenes:
        try:
            result[name] = {"slots": slots, **decode(store, emulated, slots, misses)}
        except Exception as error:  # the other scenes are still worth having
            result["problem"] += f"{name}: {type(error).__name__}: {error}\n"
    return result


if __name__ == "__main__":
    stage_main(run)
