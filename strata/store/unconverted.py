"""A checkpoint that answers like a store: each tensor is packed when it is asked for, and not kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import StoreError
from strata.plan.spec import ModelSpec
from strata.store.formats import ExpertLayout, PackedTensor
from strata.store.options import ConvertOptions
from strata.store.planning import Planner
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor
from strata.store.tasks import Task

Bytes = NDArray[np.uint8]


class UnconvertedStore:
    """Matrices are as `ConvertOptions.exact` has them: quantized where the source is, else bf16 or f16.

    Nothing is written, and memory holds only what the caller keeps.
    """

    def __init__(
        self,
        source: CheckpointSource,
        spec: ModelSpec,
        targets: Sequence[TargetTensor],
        experts: Sequence[TargetExpert],
    ) -> None:
        """Raises what planning a conversion raises: FileFormatError, IncompleteError."""
        self.spec = spec
        self._path = source.path
        self._planner = Planner(source, spec, ConvertOptions(slices=1, exact=True))
        self._plan = self._planner.plan(targets, experts)
        self._targets = {target.name: target for target in targets}
        self._experts = {ExpertId(expert.layer, expert.index): expert for expert in experts}

    def has(self, name: str) -> bool:
        """Whether the store would hold a tensor of that name."""
        return name in self._targets

    def tensor(self, name: str) -> PackedTensor:
        """A packed matrix, made now."""
        task, shape = self._task(name), self._plan.tensors[name].packed_shape()
        data, offset = np.empty(shape.nbytes, np.uint8), 0  # joining the pieces would need twice the memory
        for piece in task.pieces:
            part = piece()
            data[offset : offset + part.nbytes] = part
            offset += part.nbytes
        return PackedTensor(name, shape, data)

    def plain(self, name: str) -> NDArray[np.float32]:
        """A plain vector or matrix as f32."""
        (piece,), record = self._task(name).pieces, self._plan.tensors[name]
        data = piece()
        if record.format == "BF16":
            data = (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.uint8)
        return data.view(np.float32).reshape(record.shape)

    def expert_layout(self, layer: int) -> ExpertLayout:
        """The layout of a layer's expert records. StoreError where the layer has none."""
        if layer not in self._plan.layers:
            raise StoreError(f"{self._path}: layer {layer} has no routed experts")
        return self._plan.layers[layer].layout()

    def expert(self, expert: ExpertId) -> Bytes:
        """An expert's record, made now. StoreError where there is no such expert."""
        if expert not in self._experts:
            raise StoreError(f"{self._path}: no expert {expert.index} in layer {expert.layer}")
        task = self._planner.expert_task(self._experts[expert], self._plan.layers[expert.layer])
        (piece,) = task.pieces
        return piece()

    def _task(self, name: str) -> Task:
        if name not in self._targets:
            raise StoreError(f"{self._path} holds no tensor {name}")
        return self._planner.task(self._targets[name], self._plan.tensors[name])
