"""From a configuration, its plan and this machine to what the unit needs to know."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from pathlib import Path

import strata
from strata.config import BUNDLED_MODELS, Config
from strata.errors import UsageError
from strata.hardware.profile import HardwareProfile
from strata.interfaces.server.listening import is_loopback
from strata.interfaces.systemd.unit import Nodes, UnitSpec
from strata.plan.plan import Plan
from strata.store.manifest import MANIFEST

_FIRST_FREE_PORT = 1024  # below it a process needs a capability to listen


def describe(config: Config, plan: Plan, machine: HardwareProfile, user: str) -> UnitSpec:
    """user: whose rights the process has; "" for a unit of the own manager. Raises UsageError."""
    if config.file is None:
        raise UsageError("a service needs a configuration file", remedy="--config FILE")
    server, file = config.server, config.file.resolve()
    return UnitSpec(
        description=f"Strata: {plan.model} over HTTP",
        command=(sys.executable, "-m", "strata", "serve", "--config", str(file)),
        nodes=nodes_of(plan, machine, shutil.which("numactl")),
        user=user,
        read=(file, *_read_paths(config)),
        write=tuple(_write_paths(config)),
        local=is_loopback(server.host),
        low_port=0 < server.port < _FIRST_FREE_PORT,
        gpu=machine.device is not None and config.device.use in ("auto", "cuda"),
        drain_seconds=server.drain_seconds,
        stall_seconds=server.stall_seconds,
    )


def nodes_of(plan: Plan, machine: HardwareProfile, numactl: str | None) -> Nodes:
    """The nodes of the plan's threads, and those where its experts lie besides.

    numactl: its path; None: it is not installed.
    """
    if len(machine.nodes) == 1:
        return Nodes(why_not="this machine has one memory node")
    if numactl is None:
        return Nodes(
            why_not=f"it is not installed, though this machine has {len(machine.nodes)} memory nodes"
        )
    cpus = tuple(sorted({threads.node for threads in plan.threads}))
    chosen = next(spread for spread in plan.host.spreads if spread.spread == plan.host.spread)
    holding = {node.index for node, size in zip(machine.nodes, chosen.nbytes, strict=True) if size}
    return Nodes(cpus, tuple(sorted(holding | set(cpus))), numactl)


def service_user(asked: str | None) -> str:
    """Whose rights a system service has. UsageError where that is nobody, or would silently be root."""
    name = asked or os.environ.get("SUDO_USER", "")
    if not name or (name == "root" and not asked):
        raise UsageError(
            "whose rights shall the service have?", remedy="--run-as NAME, or sudo from an account"
        )
    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        raise UsageError(f"there is no account {name!r}", remedy="--run-as NAME of one") from None


def _read_paths(config: Config) -> list[Path]:
    """What lies outside the system's own folders: Python with this package, the model, templates and keys."""
    named = [config.server.api_key_file, config.chat.template if config.chat.template != "auto" else ""]
    named += [config.model.path if config.model.path not in BUNDLED_MODELS else ""]
    package = Path(strata.__file__).parent
    paths = [Path(sys.prefix), Path(sys.base_prefix), package, *(Path(name) for name in named if name)]
    return [*dict.fromkeys([*paths, *(path.resolve() for path in paths)])]


def _write_paths(config: Config) -> list[Path]:
    """Imported models where a folder is named for them, and the heat file inside a store."""
    found = [] if config.model.cache_dir == "auto" else [Path(config.model.cache_dir)]
    model = Path(config.model.path)
    if config.model.path not in BUNDLED_MODELS and (model / MANIFEST).is_file():
        found.append(model)
    return found
