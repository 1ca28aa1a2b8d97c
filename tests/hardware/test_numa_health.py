"""What the doctor says about memory nodes, on made-up machines: each finding with its numbers and its fix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import dual_xeon, epyc_nps4, epyc_single, meminfo, node, siblings, status, write

from strata.hardware.dmi import MemorySlot, memory_channels, memory_slots
from strata.hardware.numa_health import findings
from strata.hardware.probe import probe

THP = "sys/kernel/mm/transparent_hugepage"


def memory_device(
    locator: str, bank: str, mib: int, speed: int = 2400, configured: int = 2400, length: int = 0x28
) -> bytes:
    """One SMBIOS structure of type 17; mib 0: the slot is empty."""
    part = bytearray(length)
    part[0], part[1] = 17, length
    part[0x0C:0x0E] = mib.to_bytes(2, "little")
    part[0x10], part[0x11] = 1, 2
    if length > 0x22:
        part[0x15:0x17] = speed.to_bytes(2, "little")
        part[0x20:0x22] = configured.to_bytes(2, "little")
    return bytes(part) + locator.encode() + b"\0" + bank.encode() + b"\0\0"


def table(*parts: bytes) -> bytes:
    """With another structure before, whose string holds what looks like an end, and the end mark."""
    other = bytes([1, 8, 0, 0, 1, 0, 0, 0]) + b"A server\0\0"
    return other + b"".join(parts) + bytes([127, 4, 0, 0]) + b"\0\0"


def two_sockets(missing: tuple[str, ...] = ()) -> list[bytes]:
    """Four channels at each of two sockets, two slots per channel; the second slots are empty."""
    found = []
    for socket in (0, 1):
        for channel in range(4):
            for slot in (0, 1):
                name = f"NODE {socket} CHANNEL {channel}"
                mib = 16384 if slot == 0 and name not in missing else 0
                found.append(
                    memory_device(f"P{socket}-DIMM{'ABCD'[channel]}{slot + 1}", f"{name} DIMM {slot}", mib)
                )
    return found


def with_table(root: Path, data: bytes) -> Path:
    path = root / "sys/firmware/dmi/tables/DMI"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return root


def told(root: Path, files: Mapping[str, str] | None = None) -> str:
    write(root, files or {})
    return "\n".join(found.describe() for found in findings(probe("P", "avx2", root), root))


def test_a_good_machine_is_told_nothing_but_its_hardware_threads(tmp_path: Path) -> None:
    good = with_table(dual_xeon(tmp_path), table(*two_sockets()))
    files = {"proc/sys/kernel/numa_balancing": "0", f"{THP}/enabled": "always [madvise] never"}
    files[f"{THP}/defrag"] = "always defer defer+madvise [madvise] never"
    for cpu in range(56):
        files[f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"] = "performance"
    assert (
        told(good, files) == "56 hardware threads on 28 cores: one per core is used, two read no more memory"
    )


def test_balancing_matters_with_several_nodes_only(tmp_path: Path) -> None:
    on = {"proc/sys/kernel/numa_balancing": "1"}
    assert "sysctl kernel.numa_balancing=0" in told(dual_xeon(tmp_path / "two"), on)
    assert "balancing" not in told(epyc_single(tmp_path / "one"), on)
    assert "balancing" not in told(dual_xeon(tmp_path / "off"), {"proc/sys/kernel/numa_balancing": "0"})


@pytest.mark.parametrize(
    ("enabled", "defrag", "words"),
    [
        ("always madvise [never]", "always [madvise] never", "huge pages are off"),
        ("[always] madvise never", "[always] defer never", "defrag is always"),
        ("always [madvise] never", "always madvise [never]", "defrag is never"),
        ("always [madvise] never", "always defer [madvise] never", ""),
        ("garbage", "garbage", ""),
    ],
)
def test_huge_page_settings(tmp_path: Path, enabled: str, defrag: str, words: str) -> None:
    text = told(epyc_single(tmp_path), {f"{THP}/enabled": enabled, f"{THP}/defrag": defrag})
    assert (f"{words}" in text and f"echo madvise > /{THP}/" in text) if words else "echo madvise" not in text


def test_governors_are_counted(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    files = {base.format(cpu): "powersave" if cpu < 5 else "performance" for cpu in range(32)}
    text = told(epyc_single(tmp_path), files)
    assert "5 of 32 CPUs have the frequency governor powersave" in text
    assert "cpupower frequency-set -g performance" in text


def test_missing_channels_are_named(tmp_path: Path) -> None:
    root = with_table(dual_xeon(tmp_path), table(*two_sockets(("NODE 0 CHANNEL 3", "NODE 1 CHANNEL 2"))))
    text = told(root)
    assert "2 of 8 memory channels have no module (NODE 0 CHANNEL 3, NODE 1 CHANNEL 2)" in text
    assert "6/8 of its speed" in text and "put a module into each channel" in text


def test_slow_modules_are_counted(tmp_path: Path) -> None:
    parts = [*two_sockets()[:-2], memory_device("P1-DIMMD1", "NODE 1 CHANNEL 3 DIMM 0", 16384, 2400, 1866)]
    found = memory_channels(with_table(tmp_path, table(*parts)))
    assert found.slower == {(1866, 2400): 1} and found.empty == ()
    assert "1 memory modules run at 1866 MT/s and are made for 2400" in told(dual_xeon(tmp_path))


@pytest.mark.parametrize(
    ("locator", "bank", "channel"),
    [
        ("DIMM_P0_A0", "NODE 1 CHANNEL 2 DIMM 0", "NODE 1 CHANNEL 2"),
        ("P0_Node1_Channel2_Dimm0", "", "P0_Node1_Channel2"),
        ("DIMM 0", "P0 CHANNEL A", "P0 CHANNEL A"),
        ("CPU2_DIMM_B1", "BANK 3", "CPU2_DIMM_B"),
        ("P1-DIMMC2", "Not Specified", "P1-DIMMC"),
        ("DIMM_A1", "_Node0_Channel0_Dimm1", "_Node0_Channel0"),
        ("A7", "Not Specified", ""),
        ("DIMM 3", "Bank 0", ""),
    ],
)
def test_names_of_channels(locator: str, bank: str, channel: str) -> None:
    assert MemorySlot(locator, bank, True).channel == channel


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "channels are not known: there is no /sys/firmware/dmi/tables/DMI" in told(
        epyc_single(tmp_path / "a")
    )
    edac = {f"sys/devices/system/edac/mc/mc0/dimm{i}/size": "16384" for i in range(3)}
    assert "EDAC lists 3 modules" in told(epyc_single(tmp_path / "b"), edac)
    nameless = table(memory_device("A1", "Not Specified", 8192), memory_device("A2", "Not Specified", 0))
    text = told(with_table(epyc_single(tmp_path / "c"), nameless))
    assert "1 of 2 slots have a module, names like 'A1', 'Not Specified' tell no channels" in text
    assert "lists no memory slots" in told(with_table(epyc_single(tmp_path / "d"), table()))

    def refuse(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    secret = with_table(tmp_path / "e", table(*two_sockets()))
    monkeypatch.setattr(Path, "open", refuse)
    found = memory_channels(secret)
    assert "is for root" in found.unknown and found.fix == "sudo strata doctor"


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_table_is_a_list_of_slots(noise: bytes, cut: int) -> None:
    whole = table(*two_sockets())
    for data in (noise, whole[:cut], whole[:cut] + noise):
        assert all(isinstance(slot.channel, str) for slot in memory_slots(data))


def test_old_tables_have_short_structures() -> None:
    slots = list(memory_slots(table(memory_device("DIMM_A1", "CHANNEL A", 1024, length=0x15))))
    assert [(slot.filled, slot.speed, slot.configured) for slot in slots] == [(True, 0, 0)]


def test_a_card_on_a_socket_that_was_taken_away(tmp_path: Path) -> None:
    text = told(dual_xeon(tmp_path), status("0-13,28-41", "0-1"))
    assert "hangs from memory node 1, of whose 28 CPUs this process may use 0; it runs on node 0" in text
    assert "numactl --cpunodebind=1 --membind=1" in text


def test_cpusets_that_cut_sockets(tmp_path: Path) -> None:
    text = told(dual_xeon(tmp_path), status("0-13,28-41,14-15", "0"))
    assert "2 of the 28 CPUs of node 1" in text and "whole sockets, or one socket only" in text
    assert "memory of node 1 (128 GiB) is not allowed here: widen cpuset.mems" in text
    assert "of node 0" not in text


def test_pairs_of_hardware_threads(tmp_path: Path) -> None:
    text = told(dual_xeon(tmp_path), status("0-6,28-34", "0-1"))
    assert "14 of 56 CPUs, both hardware threads of each core" in text and "as many cores instead" in text


def test_nodes_without_memory_and_uneven_ones(tmp_path: Path) -> None:
    empty = {
        "sys/devices/system/node/online": "0-1",
        "sys/devices/system/cpu/online": "0-7",
        **node(0, "0-3", 64, "10 20"),
        **node(1, "4-7", 0, "20 10", free_gib=0),
        **siblings({cpu: str(cpu) for cpu in range(8)}),
        **meminfo(64, 60),
        **status("0-7", "0-1"),
    }
    assert "memory node 1 has 4 CPUs and no memory" in told(tmp_path / "a", empty)
    uneven = told(tmp_path / "b", {**empty, **node(1, "4-7", 16, "20 10")})
    assert "node 0: 64 GiB, node 1: 16 GiB" in uneven


def test_four_nodes_of_one_socket_are_fine(tmp_path: Path) -> None:
    text = told(epyc_nps4(tmp_path), {"proc/sys/kernel/numa_balancing": "0"})
    assert "unevenly" not in text and "may use" not in text
