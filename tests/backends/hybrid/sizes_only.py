"""Models of real sizes without a byte of data: what a timeline needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_model import TinyStore, moe_spec

from strata.backends.cpu import CpuBackend
from strata.core import ExpertId
from strata.device.base import Buffer
from strata.device.emulated import EmulatedDevice
from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec, RouterSpec
from strata.store.formats import FORMATS, ExpertLayout, PackedShape, PackedTensor


def qwen3_30b(layers: int) -> ModelSpec:
    """Qwen3-30B-A3B's config.json, with fewer layers."""
    attention = AttentionSpec(32, 4, 128, 128**-0.5, RopeSpec("default", 1e6, 128), qk_norm="head")
    experts = ExpertSpec(RouterSpec(128, 8), 768)
    return moe_spec(
        layers,
        hidden=2048,
        vocab=151936,
        context=40960,
        attention=attention,
        dense_width=6144,
        moe_layers=(True,) * layers,
        experts=experts,
    )


def glm_45_air(layers: int) -> ModelSpec:
    """GLM-4.5-Air's config.json, with fewer layers."""
    rope = RopeSpec("default", 1e6, 64)
    attention = AttentionSpec(96, 8, 128, 128**-0.5, rope, qkv_bias=True)
    router = RouterSpec(128, 8, "sigmoid", True, 1e-20, 1.0, select_bias=True)
    return moe_spec(
        layers,
        hidden=4096,
        vocab=151552,
        context=131072,
        attention=attention,
        dense_width=10944,
        moe_layers=(False, *(True,) * (layers - 1)),
        experts=ExpertSpec(router, 1408, shared_width=1408),
    )


class SizesOnlyStore(TinyStore):
    """Tensors that nobody has written or may read: the system gives no memory for them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, fmt="w4g64")
        self._record = np.empty(self.expert_layout(spec.layers - 1).record_bytes, np.uint8)

    def tensor(self, name: str) -> PackedTensor:
        shape = PackedShape(FORMATS["w4g128"], *self._shapes()[name])
        return PackedTensor(name, shape, np.empty(shape.nbytes, np.uint8))

    def plain(self, name: str) -> NDArray[np.float32]:
        return np.zeros(self._shapes()[name], np.float32)

    def expert(self, expert: ExpertId) -> NDArray[np.uint8]:
        return self._record

    def expert_layout(self, layer: int) -> ExpertLayout:
        assert self.spec.experts is not None
        fmt = FORMATS["w4g64"]
        return ExpertLayout(fmt, fmt, self.spec.hidden, self.spec.experts.width, 1, False)


class SizesOnlyCpu(CpuBackend):
    """Looks up no rows and adds up no experts."""

    def weight(self, tensor: PackedTensor) -> Any:
        return None

    def embedding(self, weight: Any, token_ids: NDArray[np.int32], scale: float) -> NDArray[np.float32]:
        return np.empty((len(token_ids), self.hidden), np.float32)

    def experts(self, x: Any, ids: NDArray[np.int32], *_: object, **__: object) -> NDArray[np.float32]:
        return np.empty((len(ids), self.hidden), np.float32)

    hidden = 0


class SizesOnlyDevice:
    """An emulated device without data, whose routers spread the tokens evenly over all experts."""

    def __init__(self, device: EmulatedDevice, experts: int) -> None:
        self._device = device
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def host_write(self, buffer: Buffer) -> NDArray[np.uint8]:
        return np.empty(buffer.nbytes, np.uint8)

    def host_read(self, buffer: Buffer) -> NDArray[np.uint8]:
        if buffer.allocation.name == "expert ids":
            ids = np.arange(buffer.nbytes // 4, dtype=np.int32) % self._experts
            return ids.view(np.uint8)
        return np.zeros(buffer.nbytes, np.uint8)
