"""heat.json: how often each expert is routed to, kept in the store so that a cache starts warm.

Heat is a hint: a file that is missing, damaged, of another model or not writable costs a cold start, never an
error. Counts hold no text; they do say which experts this machine's users favour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import StoreError
from strata.memory.experts import ExpertSpace
from strata.memory.policies.base import Policy
from strata.store.store_file import SideFile, replace_file

HEAT = "heat.json"
HALF_LIFE_STEPS = 20_000
"""Steps of a layer after which a use counts half: some days of chatting, an hour of serving."""
_FILE = SideFile("strata-heat", 1, holds="heat", owner="model", other="model", most_bytes=64 << 20)


@dataclass(frozen=True)
class LoadedHeat:
    """reason: why it is empty; "" where the file was read. missing: there is none, which is no fault."""

    heat: Heat
    reason: str
    missing: bool = False


class Heat:
    """Decayed uses of every expert and decayed steps of every layer.

    model: names the weights (a store's fingerprint); heat of another model means nothing.
    """

    def __init__(self, model: str, space: ExpertSpace) -> None:
        self.model = model
        self.space = space
        self._uses = [np.zeros(count) for count in space.per_layer]
        self._steps = [0.0] * len(space.per_layer)
        self.changed = False  # since it was made, loaded or saved
        self._keep = 0.5 ** (1 / HALF_LIFE_STEPS)

    def add(self, layer: int, experts: Sequence[int]) -> None:
        """One step: the router of `layer` chose these experts."""
        self.changed = True
        self._uses[layer] *= self._keep
        self._uses[layer][list(experts)] += 1.0
        self._steps[layer] = self._steps[layer] * self._keep + 1.0

    def shares(self, layer: int) -> NDArray[np.float64]:
        """Share `[experts]` of the layer's steps that used each; zeros where it was never routed."""
        return self._uses[layer] / max(self._steps[layer], 1.0)

    def warm_order(self, slots: int) -> list[ExpertId]:
        """The hottest experts, at most `slots`, coldest first: so the hottest are the newest ones for LRU."""
        ranked = [
            (-share, ExpertId(layer, index))
            for layer in range(len(self.space.per_layer))
            for index, share in enumerate(self.shares(layer).tolist())
            if share > 0
        ]
        return [expert for _, expert in sorted(ranked)[:slots]][::-1]

    def seed(self, policy: Policy) -> None:
        """Tell a policy, before its first access, what earlier runs used."""
        for layer, steps in enumerate(self._steps):
            if steps > 0:
                policy.seed(layer, self.shares(layer))

    def save(self, store: Path) -> str:
        """Write heat.json whole or not at all. Returns why it could not be written, "" where it was."""
        try:
            replace_file(store / HEAT, self._to_bytes())
        except OSError as error:
            return f"{store / HEAT} was not written: {error.strerror}"
        self.changed = False
        return ""

    @classmethod
    def load(cls, store: Path, model: str, space: ExpertSpace) -> LoadedHeat:
        """What earlier runs left, or empty heat and the reason."""
        path = store / HEAT
        heat = cls(model, space)
        try:
            heat._fill(_FILE.read(path, model)["layers"])
        except FileNotFoundError:
            return LoadedHeat(cls(model, space), f"there is no {path} yet", missing=True)
        except OSError as error:
            return LoadedHeat(cls(model, space), f"{path}: {error.strerror}")
        except (ValueError, TypeError, KeyError, RecursionError, StoreError) as error:
            return LoadedHeat(cls(model, space), f"{path} is ignored: {error}")
        return LoadedHeat(heat, "")

    def _fill(self, layers: Any) -> None:
        """From the file's `layers`; ValueError, TypeError or KeyError for anything odd."""
        if len(layers) != len(self.space.per_layer):
            raise ValueError(f"{len(layers)} layers, the model has {len(self.space.per_layer)}")
        for number, (entry, count) in enumerate(zip(layers, self.space.per_layer, strict=True)):
            steps, uses = _number(entry["steps"]), [_number(value) for value in entry["uses"]]
            if len(uses) != count:
                raise ValueError(f"layer {number} has {len(uses)} experts, the model {count}")
            if max(uses, default=0.0) > steps * (1 + 1e-6):
                raise ValueError(f"layer {number}: an expert has {max(uses)} uses in {steps} steps")
            self._steps[number], self._uses[number] = steps, np.array(uses, np.float64)

    def _to_bytes(self) -> bytes:
        layers = [
            {"steps": round(steps, 3), "uses": [round(value, 3) for value in uses.tolist()]}
            for steps, uses in zip(self._steps, self._uses, strict=True)
        ]
        return json.dumps({**_FILE.head(self.model), "layers": layers}).encode() + b"\n"


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]!r} is no number")
    if not 0 <= value < 1e15 or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]} uses")
    return float(value)
