"""The border between expert slots and KV pages, moved by what the pages need, in whole slots."""

from __future__ import annotations

from collections.abc import Callable

from strata.memory.expert_cache import ExpertCache
from strata.memory.regions import DeviceRegion


class SlotBorder:
    """A `kv_places.Border`: long prompts take slots, short ones give them back.

    The experts of slots that become pages are evicted, the last slots first. least_slots: never fewer,
    whatever the pages need. Slots whose experts are held or on their way stay for now: then fewer pages come
    of it. settle: lets the cache know what has arrived and what the device reads no longer.
    """

    def __init__(
        self, region: DeviceRegion, cache: ExpertCache, least_slots: int, settle: Callable[[], None]
    ) -> None:
        self._settle = settle
        self._region = region
        self._cache = cache
        self._least = least_slots
        self._most = region.slots

    def widen(self, pages: int) -> int:
        """Turn as few slots into pages as make room for `pages` pages; the pages that there are now."""
        self._settle()
        sizes, slots = self._region.sizes, self._region.slots
        floor = max(self._least, self._cache.smallest)
        while slots > floor and sizes.pages_beside(slots) < pages:
            slots -= 1
        self._move(slots, self._region.pages)
        return self._region.pages

    def narrow(self, pages: int) -> int:
        """Turn what is beyond the first `pages` pages into slots; the pages that there are now."""
        sizes, slots = self._region.sizes, self._region.slots
        while slots < self._most and sizes.pages_beside(slots + 1) >= pages:
            slots += 1
        self._move(slots, pages)
        return self._region.pages

    def _move(self, slots: int, pages_in_use: int) -> None:
        if slots == self._region.slots:
            return
        if slots < self._region.slots:
            self._cache.resize(slots)
        in_use = min(self._region.slots, slots)
        self._region.move_border(slots, slots_in_use=in_use, pages_in_use=pages_in_use)
        if slots > self._cache.slots:
            self._cache.resize(slots)
