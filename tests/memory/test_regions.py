"""The device region: whatever the border does, indices keep their bytes and nobody's bytes overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from device_figures import ROUND
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata.device.base import Buffer
from strata.device.emulated import EmulatedDevice
from strata.errors import CapacityError
from strata.memory.regions import ALIGNMENT, Arena, DeviceRegion, Level, RegionSizes

SIZES = RegionSizes(static=1000, shared=10 * 512, workspace=700, slot_bytes=500, page_bytes=300)


def make_device(capacity: int = 1 << 20) -> EmulatedDevice:
    return EmulatedDevice(replace(ROUND, memory_bytes=capacity), with_data=False)


def make_region(slots: int = 4, sizes: RegionSizes = SIZES) -> DeviceRegion:
    return DeviceRegion(make_device(), sizes, slots)


def assert_disjoint(buffers: list[Buffer]) -> None:
    spans = sorted((buffer.offset, buffer.end) for buffer in buffers)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert all(buffer.offset % ALIGNMENT == 0 for buffer in buffers)


class RegionMachine(RuleBasedStateMachine):
    """Owners take and leave indices at will; the border is asked to move anywhere."""

    @initialize(
        slot_bytes=st.integers(1, 1500),
        page_bytes=st.integers(1, 1500),
        shared=st.integers(0, 20_000),
        share=st.floats(0, 1),
    )
    def start(self, slot_bytes: int, page_bytes: int, shared: int, share: float) -> None:
        sizes = RegionSizes(777, shared, 555, slot_bytes, page_bytes)
        self.region = DeviceRegion(make_device(), sizes, int(sizes.most_slots * share))
        self.slots: set[int] = set()
        self.pages: set[int] = set()
        self.addresses: dict[tuple[str, int], int] = {}

    @rule(data=st.data(), kind=st.sampled_from(["slot", "page"]))
    def take(self, data: st.DataObject, kind: str) -> None:
        count = self.region.slots if kind == "slot" else self.region.pages
        if count:
            held = self.slots if kind == "slot" else self.pages
            held.add(data.draw(st.integers(0, count - 1)))

    @rule(data=st.data(), kind=st.sampled_from(["slot", "page"]))
    def leave(self, data: st.DataObject, kind: str) -> None:
        held = self.slots if kind == "slot" else self.pages
        if held:
            held.remove(data.draw(st.sampled_from(sorted(held))))

    @rule(slots=st.integers(-1, 30))
    def move(self, slots: int) -> None:
        region, before = self.region, self.region.slots
        in_use = {
            "slots_in_use": max(self.slots, default=-1) + 1,
            "pages_in_use": max(self.pages, default=-1) + 1,
        }
        keeps_slots = all(index < slots for index in self.slots)
        keeps_pages = all(index < region.sizes.pages_beside(slots) for index in self.pages)
        if 0 <= slots <= region.sizes.most_slots and keeps_slots and keeps_pages:
            region.move_border(slots, **in_use)
            assert region.slots == slots
            return
        with pytest.raises(CapacityError):
            region.move_border(slots, **in_use)
        assert region.slots == before

    @invariant()
    def every_index_has_its_own_bytes_for_ever(self) -> None:
        if not hasattr(self, "region"):
            return
        region = self.region
        region.check_integrity()
        assert all(index < region.slots for index in self.slots)
        assert all(index < region.pages for index in self.pages)
        slots = [region.slot(index) for index in range(region.slots)]
        pages = [region.page(index) for index in range(region.pages)]
        assert_disjoint(slots + pages)
        for kind, buffers in (("slot", slots), ("page", pages)):
            for index, buffer in enumerate(buffers):
                assert self.addresses.setdefault((kind, index), buffer.address) == buffer.address
        room = region.sizes.shared - sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in slots + pages)
        page = -(-region.sizes.page_bytes // ALIGNMENT) * ALIGNMENT
        assert room < page, "another page would fit"


TestRegionMachine = RegionMachine.TestCase
TestRegionMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_parts_fill_one_allocation_without_overlap() -> None:
    device = make_device()
    region = DeviceRegion(device, SIZES, 4)
    assert device.memory.used == SIZES.total == 1024 + 5120 + 768
    assert (region.slots, region.pages) == (4, 6)
    parts = [region.static.take(400, "norms"), region.static.take(500, "head")]
    parts += [region.slot(i) for i in range(4)] + [region.page(i) for i in range(6)]
    parts += [region.workspace.take(700, "logits")]
    assert_disjoint(parts)
    assert region.slot(0).offset == 1024
    assert region.page(0).end <= parts[-1].offset


def test_indices_beyond_the_border_do_not_exist() -> None:
    region = make_region()
    for call, index in ((region.slot, 4), (region.slot, -1), (region.page, 6), (region.page, -1)):
        with pytest.raises(IndexError, match=f"{index} of"):
            call(index)


def test_what_is_in_use_stays_and_the_numbers_are_told() -> None:
    region = make_region()
    with pytest.raises(CapacityError, match="2 expert slots are asked for, but slot 2 is in use"):
        region.move_border(2, slots_in_use=3, pages_in_use=0)
    with pytest.raises(CapacityError, match="6 expert slots leave room for 4 KV pages, but page 4 is in use"):
        region.move_border(6, slots_in_use=0, pages_in_use=5)
    with pytest.raises(CapacityError, match="11 expert slots of 500 bytes are asked for, 10 fit"):
        region.move_border(11, slots_in_use=0, pages_in_use=0)
    region.move_border(6, slots_in_use=3, pages_in_use=4)
    assert (region.slots, region.pages) == (6, 4)


def test_a_device_that_is_too_small_is_told_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=f"needs {SIZES.total} bytes of device memory, 6000 of 6000"):
        DeviceRegion(make_device(6000), SIZES, 4)


@pytest.mark.parametrize(
    "change", [{"static": -1}, {"shared": -1}, {"workspace": -1}, {"slot_bytes": 0}, {"page_bytes": 0}]
)
def test_sizes_that_cannot_be(change: dict[str, int]) -> None:
    with pytest.raises(CapacityError, match="cannot be cut like this"):
        replace(SIZES, **change)


def test_the_workspace_is_capped_and_its_scopes_nest() -> None:
    workspace = make_region().workspace
    outer = workspace.take(100, "hidden state")
    with workspace.scope():
        inner = workspace.take(200, "router logits")
        assert not inner.overlaps(outer)
        with pytest.raises(CapacityError, match="experts needs 300 bytes of workspace, 256 of 768 are free"):
            workspace.take(300, "experts")
    again = workspace.take(512, "experts")
    assert again.overlaps(inner)
    assert (workspace.used, workspace.peak) == (768, 768)
    with pytest.raises(CapacityError, match="asks for 0 bytes"):
        workspace.take(0, "nothing")


@given(st.lists(st.integers(1, 900), max_size=12))
def test_arenas_count_every_byte(requests: list[int]) -> None:
    region = make_region(sizes=replace(SIZES, workspace=2000))
    arena, taken = region.workspace, []
    for nbytes in requests:
        free = arena.total - arena.used
        if nbytes <= free:
            taken.append(arena.take(nbytes, "x"))
        else:
            with pytest.raises(CapacityError, match=f"{free} of 2048 are free"):
                arena.take(nbytes, "x")
    assert_disjoint(taken)
    assert arena.used == sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in taken)
    region.check_integrity()


def test_water_levels() -> None:
    region = make_region()
    region.static.take(300, "norms")
    with region.workspace.scope():
        region.workspace.take(700, "logits")
    assert region.levels(slots_used=3, pages_used=2) == (
        Level("static weights", 512, 1024, 512),
        Level("expert slots", 3 * 512, 4 * 512, 3 * 512),
        Level("KV pages", 2 * 512, 6 * 512, 2 * 512),
        Level("workspace", 0, 768, 768),
    )


def test_a_region_without_pages_weights_or_workspace() -> None:
    region = make_region(slots=2, sizes=RegionSizes(0, 1024, 0, 512, 512))
    assert (region.slots, region.pages) == (2, 0)
    with pytest.raises(CapacityError, match="needs 1 bytes of static weights, 0 of 0 are free"):
        region.static.take(1, "norm")
    region.check_integrity()


@pytest.mark.parametrize("damage", ["slots", "workspace", "end"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    region = make_region()
    if damage == "slots":
        region._slots = 11
    elif damage == "workspace":
        region.workspace.used = 5000
    else:
        region._shared_end += 256
    with pytest.raises(AssertionError):
        region.check_integrity()


def test_an_arena_without_memory_is_full() -> None:
    arena = Arena("workspace", None, "plan again")
    assert arena.level() == Level("workspace", 0, 0, 0)
