"""Free memory on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.hardware.host_memory import available_bytes

GIB = 1 << 30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"  # 8 GiB


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max\n", "memory.current": f"{GIB}\n"}, 8 * GIB),
        ({"memory.max": f"{3 * GIB}\n", "memory.current": f"{GIB}\n"}, 2 * GIB),
        (
            {
                "memory.max": f"{3 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
            },
            GIB,
        ),
        ({"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
        ({"memory.max": f"{64 * GIB}\n", "memory.current": "0\n"}, 8 * GIB),
        (
            {"memory/memory.limit_in_bytes": f"{4 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"},
            3 * GIB,
        ),
        (
            {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/memory.usage_in_bytes": "5\n"},
            8 * GIB,
        ),
        ({"memory.max": "what?\n", "memory.current": f"{GIB}\n"}, 8 * GIB),
    ],
    ids=["no cgroup", "no limit", "v2", "v2 page cache", "over", "v2 above", "v1", "v1 without", "odd"],
)
def test_the_tighter_of_machine_and_cgroup(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    cgroup = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, **cgroup})
    assert available_bytes(root) == expected


def group(limit: str, used: int) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n"}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"system.slice/strata.service": group(f"{2 * GIB}", GIB)}, GIB),
        (
            {"system.slice": group(f"{3 * GIB}", GIB), "system.slice/strata.service": group("max", GIB)},
            2 * GIB,
        ),
        (
            {
                "system.slice": group(f"{4 * GIB}", 3 * GIB),
                "system.slice/strata.service": group(f"{3 * GIB}", 0),
            },
            GIB,
        ),
        ({"other.slice": group(f"{GIB}", 0)}, 8 * GIB),
    ],
    ids=["own", "parent", "parent is fuller", "foreign"],
)
def test_a_service_is_bound_by_every_group_above_it(
    tmp_path: Path, limits: dict[str, dict[str, str]], expected: int
) -> None:
    """systemd's MemoryMax stands at the service's own group, not at the root of the hierarchy."""
    files = {
        f"sys/fs/cgroup/{path}/{name}": text for path, group in limits.items() for name, text in group.items()
    }
    own = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/system.slice/strata.service\n"}
    assert available_bytes(machine(tmp_path, {**own, **files})) == expected


def test_nothing_readable_means_nothing_known_to_be_free(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0


def test_this_machine() -> None:
    assert available_bytes() > 0
