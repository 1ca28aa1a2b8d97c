"""Eviction and admission policies of the expert cache, by name. `belady` needs a trace: see `replay`."""

from __future__ import annotations

from strata.memory.policies.base import Evictable, Policy, PolicyFactory
from strata.memory.policies.forecast import ForecastPolicy
from strata.memory.policies.lfu import LfuPolicy
from strata.memory.policies.lru import LruPolicy

POLICIES: dict[str, PolicyFactory] = {"lru": LruPolicy, "lfu": LfuPolicy, "forecast": ForecastPolicy}

__all__ = ["POLICIES", "Evictable", "ForecastPolicy", "LfuPolicy", "LruPolicy", "Policy", "PolicyFactory"]
