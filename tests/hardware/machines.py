"""Made-up machines: trees of /proc and /sys as kernels of real ones show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30
Files = dict[str, str]

_LIVE = "13:memory:{v1}\n4:cpu,cpuacct:{v1}\n3:cpuset:{v1}\n0::{v2}\n"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="ascii")
    return root


def node(index: int, cpus: str, gib: int, distances: str, free_gib: int | None = None) -> Files:
    base = f"sys/devices/system/node/node{index}"
    free = gib - 2 if free_gib is None else free_gib
    return {
        f"{base}/cpulist": cpus,
        f"{base}/distance": distances,
        f"{base}/meminfo": f"Node {index} MemTotal:       {gib << 20} kB\n"
        f"Node {index} MemFree:        {free << 20} kB\nNode {index} Inactive(file):  {1 << 20} kB\n",
    }


def pool(index: int, kib: int, total: int, free: int) -> Files:
    base = f"sys/devices/system/node/node{index}/hugepages/hugepages-{kib}kB"
    return {f"{base}/nr_hugepages": str(total), f"{base}/free_hugepages": str(free)}


def siblings(pairs: Mapping[int, str]) -> Files:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in pairs.items()
    }


def meminfo(gib: int, free_gib: int) -> Files:
    return {
        "proc/meminfo": f"MemTotal:       {gib << 20} kB\nMemFree:        {free_gib << 20} kB\n"
        f"MemAvailable:   {free_gib << 20} kB\n"
    }


def status(cpus: str, mems: str) -> Files:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n"}


def card(root: Path, address: str, path: tuple[str, ...], files: Mapping[str, str], bridge: Files) -> None:
    """A card behind bridges: /sys/bus/pci/devices/ADDRESS is a link to where it hangs."""
    folder = root / "sys/devices/pci0000:80"
    for name in path:
        folder = folder / name
        write(folder, {"vendor": "0x8086", "class": "0x060400", "numa_node": "-1", **bridge})
    write(folder / address, {"vendor": "0x10de", "class": "0x030000", **files})
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / address).symlink_to(folder / address)


SLOT_3 = {"max_link_speed": "8.0 GT/s PCIe", "max_link_width": "16"}
IDLE_3090 = {
    "device": "0x2204",
    "numa_node": "1",
    "max_link_speed": "16.0 GT/s PCIe",
    "max_link_width": "16",
    "current_link_speed": "2.5 GT/s PCIe",
    "current_link_width": "16",
}


def dual_xeon(root: Path) -> Path:
    """Two E5-2680 v4 with hyper-threading, 128 GiB at each, huge pages at node 1, an idle 3090 at node 1."""
    cores = {cpu: f"{cpu % 28},{cpu % 28 + 28}" for cpu in range(56)}
    files = {
        "sys/devices/system/node/online": "0-1",
        "sys/devices/system/cpu/online": "0-55",
        **node(0, "0-13,28-41", 128, "10 21"),
        **node(1, "14-27,42-55", 128, "21 10", free_gib=100),
        **pool(1, 2048, 4096, 4000),
        **pool(1, 1048576, 16, 16),
        **pool(0, 2048, 0, 0),
        **siblings(cores),
        **meminfo(256, 225),
        **status("0-55", "0-1"),
    }
    write(root, files)
    card(root, "0000:82:00.0", ("0000:80:02.0",), IDLE_3090, SLOT_3)
    return root


def epyc_single(root: Path) -> Path:
    """An EPYC 7302 in NPS1: 16 cores, one node."""
    cores = {cpu: f"{cpu % 16},{cpu % 16 + 16}" for cpu in range(32)}
    files = {"sys/devices/system/node/online": "0", "sys/devices/system/cpu/online": "0-31"}
    files |= {**node(0, "0-31", 256, "10"), **siblings(cores), **meminfo(256, 250), **status("0-31", "0")}
    return write(root, files)


def epyc_nps4(root: Path) -> Path:
    """The same processor in NPS4: four nodes of four cores."""
    cores = {cpu: f"{cpu % 16},{cpu % 16 + 16}" for cpu in range(32)}
    files = {"sys/devices/system/node/online": "0-3", "sys/devices/system/cpu/online": "0-31"}
    for index in range(4):
        far = " ".join("10" if other == index else "12" for other in range(4))
        files |= node(index, f"{4 * index}-{4 * index + 3},{4 * index + 16}-{4 * index + 19}", 64, far)
    return write(root, {**files, **siblings(cores), **meminfo(256, 250), **status("0-31", "0-3")})


def v1_mounts(root_of: str = "/") -> str:
    """Version 1 controllers mounted one by one, as Docker on an older system has them."""
    lines = []
    for number, names in enumerate(("memory", "cpu,cpuacct", "cpuset"), start=30):
        lines.append(
            f"{number} 25 0:{number} {root_of} /sys/fs/cgroup/{names} rw,nosuid - cgroup cgroup rw,{names}"
        )
    return "\n".join(lines)


V2_MOUNT = "30 25 0:26 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n"


def v1_parent(root: Path) -> Path:
    """A pod: the container's own group has no limits, its parent has."""
    base = "sys/fs/cgroup"
    files = {
        "proc/self/mountinfo": v1_mounts(),
        "proc/self/cgroup": _LIVE.format(v1="/kubepods/pod7/c1", v2="/"),
        f"{base}/memory/memory.limit_in_bytes": str(2**63 - 4096),
        f"{base}/memory/memory.usage_in_bytes": str(90 * GIB),
        f"{base}/memory/kubepods/memory.limit_in_bytes": str(200 * GIB),
        f"{base}/memory/kubepods/memory.usage_in_bytes": str(80 * GIB),
        f"{base}/memory/kubepods/pod7/memory.limit_in_bytes": str(16 * GIB),
        f"{base}/memory/kubepods/pod7/memory.usage_in_bytes": str(6 * GIB),
        f"{base}/memory/kubepods/pod7/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
        f"{base}/memory/kubepods/pod7/c1/memory.limit_in_bytes": str(2**63 - 4096),
        f"{base}/memory/kubepods/pod7/c1/memory.usage_in_bytes": str(5 * GIB),
        f"{base}/cpu,cpuacct/kubepods/pod7/cpu.cfs_quota_us": "600000",
        f"{base}/cpu,cpuacct/kubepods/pod7/cpu.cfs_period_us": "100000",
        f"{base}/cpu,cpuacct/kubepods/pod7/c1/cpu.cfs_quota_us": "-1",
        f"{base}/cpu,cpuacct/kubepods/pod7/c1/cpu.cfs_period_us": "100000",
        f"{base}/cpuset/kubepods/pod7/cpuset.cpus": "0-7",
        f"{base}/cpuset/kubepods/pod7/cpuset.mems": "0",
        f"{base}/cpuset/kubepods/pod7/c1/cpuset.cpus": "0-27",
    }
    return write(root, files)


def v1_hidden_parent(root: Path) -> Path:
    """Docker without a cgroup namespace: the own group is the mount's root; the limit stands above it."""
    files = {
        "proc/self/mountinfo": v1_mounts("/docker/abc"),
        "proc/self/cgroup": _LIVE.format(v1="/docker/abc", v2="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {8 * GIB}\ntotal_inactive_file 0\n",
    }
    return write(root, files)


def v2_nested(root: Path) -> Path:
    """A systemd service in a slice: MemoryMax at the slice, MemoryHigh and CPUQuota at the service."""
    base = "sys/fs/cgroup/system.slice"
    files = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/system.slice/strata.service\n",
        f"{base}/memory.max": str(64 * GIB),
        f"{base}/memory.current": str(10 * GIB),
        f"{base}/cpu.max": "max 100000",
        f"{base}/strata.service/memory.max": "max",
        f"{base}/strata.service/memory.high": str(48 * GIB),
        f"{base}/strata.service/memory.current": str(8 * GIB),
        f"{base}/strata.service/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
        f"{base}/strata.service/cpu.max": "350000 100000",
        f"{base}/strata.service/cpuset.cpus.effective": "0-3",
        f"{base}/strata.service/cpuset.mems.effective": "1",
    }
    return write(root, files)
