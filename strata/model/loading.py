"""Handles on a store's tensors, each checked against the shape that the ModelSpec asks for."""

from __future__ import annotations

from copy import copy
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Backend
from strata.backends.parts import Array, ExpertBank, Norm, Weight
from strata.core import ExpertId
from strata.errors import StoreError
from strata.memory.expert_host import HostExperts
from strata.memory.node_copies import NodeCopies
from strata.memory.node_experts import NodeExperts
from strata.store import names
from strata.store.formats import ExpertLayout, PackedTensor

_REMEDY = "convert the checkpoint again, or run `strata verify` on the store"


class WeightStore(Protocol):
    """What the decoder needs of a store (`strata.store.reader.Store`)."""

    def has(self, name: str) -> bool:
        """Whether the store holds a tensor of that name."""
        ...

    def tensor(self, name: str) -> PackedTensor:
        """A packed matrix, mapped."""
        ...

    def plain(self, name: str) -> NDArray[Any]:
        """A plain vector or matrix."""
        ...

    def expert_layout(self, layer: int) -> ExpertLayout:
        """The layout of a layer's expert records."""
        ...

    def expert(self, expert: ExpertId) -> NDArray[np.uint8]:
        """An expert's record, mapped."""
        ...


class Weights:
    """Makes handles; `prefix` stands before every name, see `layer`. tier: experts come through it, if any.
    placed: holds their slices, or copies of them, on several memory nodes.

    nbytes: bytes of each tensor loaded so far by its full name (plain ones as f32); layers share it.
    """

    def __init__(
        self,
        store: WeightStore,
        backend: Backend,
        tier: HostExperts | None = None,
        placed: NodeExperts | NodeCopies | None = None,
    ) -> None:
        self.store = store
        self.tier = tier
        self.placed = placed
        self.backend = backend
        self.prefix = ""
        self.nbytes: dict[str, int] = {}

    def layer(self, index: int) -> Weights:
        """The same for the parts of decoder layer `index`."""
        part = copy(self)
        part.prefix = names.layer(index, "")
        return part

    def matrix(self, part: str, rows: int, cols: int) -> Weight:
        """A packed matrix's handle; StoreError when its shape is not [rows, cols]."""
        tensor = self.store.tensor(self.prefix + part)
        self._check(part, (tensor.shape.rows, tensor.shape.cols), (rows, cols))
        self.nbytes[self.prefix + part] = tensor.shape.nbytes
        return self.backend.weight(tensor)

    def vector(self, part: str, *shape: int, scale: float = 1.0) -> Array:
        """A plain vector or matrix times `scale`; StoreError when its shape is another."""
        values = np.asarray(self.store.plain(self.prefix + part), dtype=np.float32)
        self._check(part, values.shape, shape)
        self.nbytes[self.prefix + part] = values.nbytes
        return self.backend.vector(values if scale == 1.0 else values * np.float32(scale))

    def vector_if(self, wanted: bool, part: str, *shape: int) -> Array | None:
        """`vector`, or None for models that do not have this part."""
        return self.vector(part, *shape) if wanted else None

    def norm(self, part: str, size: int, eps: float, scale: float = 1.0) -> Norm:
        """An RMSNorm over `size` elements."""
        return Norm(self.vector(part, size, scale=scale), eps)

    def experts(self, layer: int, count: int) -> ExpertBank:
        """The routed experts of a layer: the one place they come from."""
        layout = self.store.expert_layout(layer)

        def record(index: int) -> NDArray[np.uint8]:
            return self.store.expert(ExpertId(layer, index))

        def pieces(index: int) -> tuple[NDArray[np.uint8], ...] | NDArray[np.uint8]:
            assert self.placed is not None
            return self.placed.pieces(ExpertId(layer, index))

        if self.placed is None:
            return ExpertBank(layer, count, layout, record, self.tier)
        return ExpertBank(layer, count, layout, record, self.tier, pieces, self.placed.copies)

    def _check(self, part: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            cause = f"{self.prefix}{part} is {list(shape)} in the store, the spec asks for {list(wanted)}"
            raise StoreError(cause, remedy=_REMEDY)
