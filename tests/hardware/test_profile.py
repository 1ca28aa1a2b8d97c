"""Made-up machines as profiles: nodes, limits, cards, links, and what is broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GIB, write

from strata.hardware import cgroup
from strata.hardware.cpu import allowed_cpus, topology
from strata.hardware.host_memory import available_bytes
from strata.hardware.numa import HugePages, MemoryNode, memory_nodes
from strata.hardware.pci import graphics_cards
from strata.hardware.probe import LINK_SHARE, probe
from strata.hardware.profile import HardwareProfile


def profile(root: Path) -> HardwareProfile:
    return probe("a processor", "avx2", root)


def test_two_sockets_with_a_card_on_the_second(tmp_path: Path) -> None:
    found = profile(machines.dual_xeon(tmp_path))
    first, second = found.nodes
    assert first.cores == tuple(range(14)) and first.cpus == (*range(14), *range(28, 42))
    assert second.cores == tuple(range(14, 28)) and second.distances == (21, 10)
    assert (first.memory, first.free) == (128 * GIB, 127 * GIB)
    assert second.huge_pages == (HugePages(2 << 20, 4096, 4000), HugePages(1 << 30, 16, 16))
    assert first.huge_pages == ()
    assert found.memory == 256 * GIB and found.available == 225 * GIB and found.warnings == ()
    device = found.device
    assert device is not None and device.name.endswith("RTX 3090")
    assert device.node == 1 and device.memory == 24 * GIB


def test_an_idle_card_is_planned_at_the_speed_of_its_slot(tmp_path: Path) -> None:
    """The card could do 4.0, the slot 3.0, and the idle link shows 1.0."""
    found = profile(machines.dual_xeon(tmp_path))
    assert found.device is not None and found.device.link is not None
    link = found.device.link
    assert (link.generation, link.width, link.now_generation) == (3, 16, 1)
    assert "now 1.0: an idle card" in link.describe()
    assert link.bandwidth == pytest.approx(15.75e9, rel=1e-3)
    assert found.device.to_device.value == pytest.approx(12e9, rel=1e-3)
    assert found.device.to_device.source == "assumed"


def test_fewer_lanes_than_possible_are_told(tmp_path: Path) -> None:
    files = {**machines.IDLE_3090, "current_link_width": "4", "current_link_speed": "8.0 GT/s PCIe"}
    machines.card(machines.epyc_single(tmp_path), "0000:82:00.0", ("0000:80:02.0",), files, machines.SLOT_3)
    found = profile(tmp_path)
    assert found.device is not None and found.device.link is not None and found.device.link.width == 4
    assert found.device.to_device.value == pytest.approx(LINK_SHARE * 15.75e9 / 4, rel=1e-3)
    assert "4 PCIe lanes of 16: copies take 4 times as long" in found.warnings[0]


@pytest.mark.parametrize(
    "files",
    [
        {"max_link_speed": "Unknown", "max_link_width": "255", "current_link_width": "0"},
        {"max_link_speed": "999 GT/s PCIe", "max_link_width": "-16"},
        {"max_link_speed": "", "max_link_width": "sixteen"},
    ],
)
def test_links_that_cannot_be_are_unknown(tmp_path: Path, files: dict[str, str]) -> None:
    machines.card(machines.epyc_single(tmp_path), "0000:01:00.0", (), {"device": "0x2204", **files}, {})
    found = profile(tmp_path)
    assert found.device is not None and found.device.link is None
    assert "PCIe 3.0 x16 is assumed" in found.warnings[0]


def test_a_bridge_knows_the_node_that_the_card_does_not_tell(tmp_path: Path) -> None:
    root = machines.dual_xeon(tmp_path)
    shutil.rmtree(root / "sys/bus")
    files = {**machines.IDLE_3090, "numa_node": "-1"}
    machines.card(root, "0000:83:00.0", ("0000:80:03.0",), files, {**machines.SLOT_3, "numa_node": "1"})
    found = profile(root)
    assert found.device is not None and found.device.node == 1 and found.warnings == ()


def test_a_card_without_a_node_gets_the_first_and_a_sentence(tmp_path: Path) -> None:
    root = machines.dual_xeon(tmp_path)
    shutil.rmtree(root / "sys/bus")
    for node in ("-1", "77"):
        shutil.rmtree(root / "sys/bus", ignore_errors=True)
        files = {**machines.IDLE_3090, "numa_node": node}
        machines.card(root, f"0000:8{node[-1]}:00.0", ("0000:80:04.0",), files, machines.SLOT_3)
        found = profile(root)
        assert found.device is not None and found.device.node == 0
        assert "node 0 is assumed" in found.warnings[-1]


def test_unknown_and_further_cards_stay_idle(tmp_path: Path) -> None:
    root = machines.dual_xeon(tmp_path)
    machines.card(root, "0000:03:00.0", (), {**machines.IDLE_3090, "device": "0x0def"}, {})
    machines.card(root, "0000:90:00.0", (), machines.IDLE_3090, {})
    found = profile(root)
    assert found.device is not None and found.device.node == 1
    assert any("10de:0def" in text for text in found.warnings)
    assert any("second card, 0000:90:00.0" in text for text in found.warnings)
    assert len(graphics_cards(root)) == 3


def test_one_node_and_four_nodes_of_one_socket(tmp_path: Path) -> None:
    single = profile(machines.epyc_single(tmp_path / "a"))
    assert len(single.nodes) == 1 and single.nodes[0].cores == tuple(range(16))
    four = profile(machines.epyc_nps4(tmp_path / "b"))
    assert [node.cores for node in four.nodes] == [tuple(range(4 * i, 4 * i + 4)) for i in range(4)]
    assert four.memory == single.memory == 256 * GIB
    assert four.nodes[2].distances == (12, 12, 10, 12)


def test_limits_of_a_parent_in_version_1(tmp_path: Path) -> None:
    root = machines.v1_parent(machines.dual_xeon(tmp_path))
    limit = cgroup.memory_limit(root)
    assert limit is not None and limit.bytes == 16 * GIB and "pod7/memory.limit" in str(limit.path)
    assert limit.room == 11 * GIB  # 16 less 6, and 1 of page cache
    assert cgroup.cpu_quota(root) == 6.0
    found = profile(root)
    assert found.memory == 16 * GIB and found.available == 11 * GIB and found.quota == 6.0
    assert found.allowed_cpus == tuple(range(8)) and not found.nodes[1].cpus
    assert not found.nodes[1].usable
    assert any(str(16 * GIB) in text for text in found.warnings)


def test_a_limit_above_what_a_container_sees(tmp_path: Path) -> None:
    """Version 1 tells it in memory.stat only."""
    root = machines.v1_hidden_parent(machines.epyc_single(tmp_path))
    found = profile(root)
    assert found.memory == 8 * GIB and found.available == 5 * GIB


def test_limits_on_the_way_up_in_version_2(tmp_path: Path) -> None:
    root = machines.v2_nested(machines.dual_xeon(tmp_path))
    found = profile(root)
    assert found.memory == 48 * GIB  # the service's memory.high, below the slice's memory.max
    assert found.available == 42 * GIB  # 48 less 8, and 2 of page cache; the slice has 54 left
    assert found.quota == 3.5
    assert found.allowed_cpus == (0, 1, 2, 3)
    assert [node.usable for node in found.nodes] == [False, True]
    assert any("node 0 has CPUs but its memory is not allowed" in text for text in found.warnings)
    assert any("node 1 has memory but no CPU" in text for text in found.warnings)


def test_hybrid_hierarchies_take_the_tightest(tmp_path: Path) -> None:
    root = machines.v1_hidden_parent(machines.epyc_single(tmp_path))
    mounts = (
        machines.v1_mounts("/docker/abc") + "\n31 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    own = "13:memory:/docker/abc\n0::/x\n"
    files = {"proc/self/mountinfo": mounts, "proc/self/cgroup": own}
    files |= {"sys/fs/cgroup/unified/memory.max": str(4 * GIB), "sys/fs/cgroup/unified/memory.current": "0"}
    write(root, files)
    assert profile(root).memory == 4 * GIB


def test_a_group_outside_of_the_mount_is_the_mount(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/../../other\n", "proc/self/mountinfo": machines.V2_MOUNT})
    write(tmp_path, {"sys/fs/cgroup/memory.max": str(GIB), "other/memory.max": "1"})
    assert cgroup.groups("memory", tmp_path) == (tmp_path / "sys/fs/cgroup",)


def test_mount_points_with_blanks(tmp_path: Path) -> None:
    mount = "30 25 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n"
    write(tmp_path, {"proc/self/mountinfo": mount, "my groups/memory.max": str(GIB)})
    found = cgroup.memory_limit(tmp_path)
    assert found is not None and found.bytes == GIB and found.room == GIB


def test_offline_processors_are_not_used(tmp_path: Path) -> None:
    """The process may use 0-31 by its mask, but 4-7 and 20-23 are switched off."""
    root = write(machines.epyc_single(tmp_path), {"sys/devices/system/cpu/online": "0-3,8-19,24-31"})
    assert allowed_cpus(root) == (*range(4), *range(8, 20), *range(24, 32))
    assert profile(root).nodes[0].cores == (*range(4), *range(8, 16))


def test_missing_files_leave_one_node(tmp_path: Path) -> None:
    found = profile(write(tmp_path, {"proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n"}))
    assert found.nodes == (MemoryNode(0, (0,), (0,), GIB, 0),)
    assert found.memory == GIB and found.available == GIB // 2 and found.device is None


def test_an_empty_tree_is_a_machine_without_memory(tmp_path: Path) -> None:
    found = profile(tmp_path)
    assert found.memory == 0 and found.available == 0
    assert found.warnings == ("node 0 tells no memory size",)


ABSURD = {
    "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: {10**17} kB\nNode 0 MemFree: -5 kB\n",
    "sys/devices/system/node/node0/distance": "10 999999999999999999999999",
    "sys/devices/system/node/node1/distance": "10",
    "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages": str(10**15),
    "sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages": "99",
    "sys/fs/cgroup/memory.max": "1e9",
    "sys/fs/cgroup/cpu.max": "5 0",
    "proc/self/status": "Cpus_allowed_list:\t0-99999999999\nMems_allowed_list:\tall\n",
    "proc/self/mountinfo": "1 2 3\n - cgroup2\n30 25 0:26 / /sys/fs/cgroup rw - cgroup2\n",
    "proc/self/cgroup": "zero::/\n::::\n",
}


def test_absurd_values_are_left_out(tmp_path: Path) -> None:
    found = profile(write(machines.dual_xeon(tmp_path), ABSURD))
    assert found.nodes[0].memory == 0 and found.nodes[1].memory == 128 * GIB
    assert found.nodes[0].distances == found.nodes[1].distances == ()
    assert found.nodes[1].huge_pages == (HugePages(1 << 30, 16, 16),)  # no more are free than there are
    assert found.memory_limit is None and found.quota is None
    assert len(found.allowed_cpus) == 56


TEXTS = st.one_of(
    st.text(st.characters(codec="ascii"), max_size=30),
    st.sampled_from(["max", "-1", "0", "0-", "9" * 40, "10 20", "0-3", "8.0 GT/s", "\0", "1 2 3 4", ""]),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_content_of_any_file_is_an_exception(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = machines.v2_nested(machines.dual_xeon(tmp_path_factory.mktemp("m")))
    files = sorted(path for path in root.rglob("*") if path.is_file() and "cpu/cpu" not in str(path))
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=8)):
        path.write_text(data.draw(TEXTS), encoding="ascii")
    found = profile(root)
    assert found.available >= 0 and 0 <= found.memory <= 1 << 52
    assert found.nodes and all(set(node.cores) <= set(node.cpus) for node in found.nodes)
    assert found.quota is None or found.quota > 0
    shutil.rmtree(root)


def test_this_machine() -> None:
    found = probe("here", "avx2")
    assert found.available <= found.memory
    assert found.available == pytest.approx(available_bytes(), rel=0.2)
    assert found.allowed_cpus == topology().allowed
    assert sum(len(node.cores) for node in memory_nodes(topology())) >= 1
