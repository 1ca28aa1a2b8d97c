"""The text of the unit: what systemd is told about one service (man systemd.service, man systemd.exec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.errors import UsageError

MARK = "# Written by `strata service install`; another install or uninstall replaces or removes it."
START_SECONDS = 900
"""For loading, and again after each sign of progress: the first token of a 60 GB store needs seconds, its
import on the first start needs minutes."""
_DRAIN_MARGIN = 20  # seconds beyond server.drain_seconds: for the last words and the engine's thread
_STALLS = 2  # /health says degraded after stall_seconds without a token; after so many times that, a restart
_HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))


@dataclass(frozen=True)
class Nodes:
    """Memory nodes to run on. why_not: what there is to say where numactl is not used."""

    cpus: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    numactl: str = ""
    why_not: str = ""

    def prefix(self) -> list[str]:
        """What stands before the command."""
        if self.why_not:
            return []
        cpus, memory = (",".join(map(str, nodes)) for nodes in (self.cpus, self.memory))
        return [self.numactl, f"--cpunodebind={cpus}", f"--membind={memory}", "--"]


@dataclass(frozen=True)
class UnitSpec:
    """One service. command: without numactl. user: "" for a unit of a user's own manager.

    read: paths that it must be able to read; write: those that it also writes. local: only this machine can
    reach it; low_port: it listens below 1024. gpu: it may use a graphics card.
    """

    description: str
    command: tuple[str, ...]
    nodes: Nodes
    user: str
    read: tuple[Path, ...]
    write: tuple[Path, ...]
    local: bool
    low_port: bool
    gpu: bool
    drain_seconds: int
    stall_seconds: int

    @property
    def own_manager(self) -> bool:
        """Whether it runs under a user's own manager, which may confine less."""
        return not self.user


def unit_text(spec: UnitSpec) -> str:
    """The whole file."""
    sections = (
        ("Unit", _unit(spec)),
        ("Service", [*_process(spec), *_limits(spec), *_hardening(spec)]),
        ("Install", [f"WantedBy={'default.target' if spec.own_manager else 'multi-user.target'}"]),
    )
    return "\n\n".join([MARK, *(f"[{name}]\n" + "\n".join(lines) for name, lines in sections)]) + "\n"


def quoted(words: Sequence[str]) -> str:
    """A command line for ExecStart=: % and $ would be expanded, spaces and quotes would split words.

    Raises UsageError for control characters.
    """
    return " ".join(_quoted(word).replace("$", "$$") for word in words)  # Exec lines know variables


def _one_line(text: str) -> str:
    """A model's name comes from its file: it must not add lines to the unit."""
    return "".join(c for c in text.replace("%", "%%") if c.isprintable()).rstrip("\\")


def _quoted(word: str) -> str:
    if not word.isprintable():
        raise UsageError(f"{word!r}: control characters in a path", remedy="rename it")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    plain = escaped == word and word and not any(c.isspace() or c in "$';" for c in word)
    return word if plain else f'"{escaped}"'


def _unit(spec: UnitSpec) -> list[str]:
    lines = [
        f"Description={_one_line(spec.description)}",
        "# Five failures within ten minutes, and systemd gives up.",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
    ]
    if not spec.own_manager and not spec.local:
        lines += ["Wants=network-online.target", "After=network-online.target"]
    return lines


def _process(spec: UnitSpec) -> list[str]:
    nodes = [f"# No numactl: {spec.nodes.why_not}."] if spec.nodes.why_not else []
    lines = [
        "Type=notify",
        "NotifyAccess=main",
        "WorkingDirectory=/",
        *nodes,
        f"ExecStart={quoted([*spec.nodes.prefix(), *spec.command])}",
        "# Loading may take longer than this: every sign of progress extends it.",
        f"TimeoutStartSec={START_SECONDS}",
        f"# Running answers have {spec.drain_seconds} s to end.",
        f"TimeoutStopSec={spec.drain_seconds + _DRAIN_MARGIN}",
        "KillMode=mixed",
        "# Fed while tokens come or nobody asks for any; a hung step is not fed.",
        f"WatchdogSec={_STALLS * spec.stall_seconds}",
        "Restart=on-failure",
        "RestartSec=2",
        "# A mistake in the configuration does not go away by itself.",
        "RestartPreventExitStatus=2",
        "SyslogIdentifier=strata",
        "Environment=PYTHONUNBUFFERED=1",
    ]
    if spec.user:
        # systemd makes /var/cache/strata for the user; Strata looks for its cache below XDG_CACHE_HOME
        cache = ["CacheDirectory=strata", "Environment=XDG_CACHE_HOME=%C"]
        lines += [f"User={spec.user}", *cache]
    return lines


def _limits(spec: UnitSpec) -> list[str]:
    return [
        "# Experts and staging buffers are page-locked.",
        "LimitMEMLOCK=infinity",
        "# Every connection and every shard of the store is a file.",
        "LimitNOFILE=65536",
    ]


def _hardening(spec: UnitSpec) -> list[str]:
    """No MemoryDenyWriteExecute: kernels and closures are made at run time. With a card
    nothing that closes the list of devices: PrivateDevices, ProtectClock."""
    lines = [
        "NoNewPrivileges=yes",
        "UMask=0077",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallErrorNumber=EPERM",
    ]
    return lines if spec.own_manager else [*lines, *_system_hardening(spec)]


def _system_hardening(spec: UnitSpec) -> list[str]:
    """What needs mounts of its own, which a user's manager cannot be relied on to make."""
    paths = (*spec.read, *spec.write)
    lines = [
        "ProtectSystem=strict",
        *(f"ReadWritePaths={_quoted('-' + str(path))}" for path in spec.write),
        f"ProtectHome={'read-only' if _any_below(paths, _HOMES) else 'yes'}",
        *([] if _any_below(paths, _TEMPORARY) else ["PrivateTmp=yes"]),
        *([] if spec.gpu else ["PrivateDevices=yes", "ProtectClock=yes"]),
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
    ]
    if spec.local:
        lines += ["IPAddressDeny=any", "IPAddressAllow=localhost"]
    bind = "CAP_NET_BIND_SERVICE" if spec.low_port else ""
    return [*lines, f"CapabilityBoundingSet={bind}", f"AmbientCapabilities={bind}"]


def _any_below(paths: Sequence[Path], folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for path in paths for folder in folders)
