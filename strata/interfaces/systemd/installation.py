"""Where units lie, and the manager that runs them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from strata.errors import StrataError, UsageError
from strata.interfaces.systemd.unit import MARK

_SYSTEM_UNITS = Path("/etc/systemd/system")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SHOWN = ("ActiveState", "SubState", "StatusText", "MainPID", "NRestarts", "Result")
_SECONDS = 120.0


@dataclass(frozen=True)
class Installation:
    """The unit of one name. own: in the user's own manager, not the system's. seconds: for what systemctl is
    told, which waits for running answers when it stops and for the model when it starts."""

    name: str
    own: bool
    seconds: float = _SECONDS

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith(".service"):
            raise UsageError(
                f"{self.name!r} is no name for a service", remedy="letters, digits, - and _, without .service"
            )

    @property
    def unit(self) -> str:
        """Its name for systemctl."""
        return f"{self.name}.service"

    @property
    def file(self) -> Path:
        """Where the unit lies."""
        if not self.own:
            return _SYSTEM_UNITS / self.unit
        named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        base = named if named.is_absolute() else Path("~/.config").expanduser()  # as its specification says
        return base / "systemd" / "user" / self.unit

    def write(self, text: str) -> None:
        """Replace what an earlier install wrote. UsageError for somebody else's unit of that name."""
        self._require_ours()
        partial = self.file.with_suffix(".partial")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.file)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            denied = isinstance(error, PermissionError)
            remedy = "sudo for a system service, or --user" if denied else "make room or choose --user"
            raise UsageError(f"{self.file}: {error.strerror}", remedy=remedy) from None

    def require_installed(self) -> None:
        """UsageError when there is no such unit, or when it is somebody else's."""
        if not self.file.exists():
            raise UsageError(
                f"{self.file} does not exist: the service is not installed",
                remedy="strata service install --config FILE, or another --name, or --user",
            )
        self._require_ours()

    def remove(self) -> None:
        """Remove the file; what it started is left alone. Raises as `require_installed`."""
        self.require_installed()
        self.file.unlink()

    def control(self, *words: str) -> str | None:
        """What systemctl prints; None where no systemd runs. StrataError when it fails."""
        program = shutil.which("systemctl")
        if program is None or not self.managed():
            return None
        command = [program, *(["--user"] if self.own else []), *words]
        shown = " ".join(["systemctl", *command[1:]])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.seconds)
        except subprocess.TimeoutExpired:  # the manager goes on without who asked it
            raise StrataError(
                f"{shown} has not come back after {self.seconds:g} s: a first start imports the model",
                remedy="strata service status says how far it is",
            ) from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise StrataError(f"{shown} failed: {said}", remedy="journalctl says more")
        return done.stdout

    def managed(self) -> bool:
        """Whether the manager that would run it is there (man sd_booted; its socket for a user's own)."""
        if not self.own:
            return Path("/run/systemd/system").is_dir()
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        return bool(runtime) and (Path(runtime) / "systemd").is_dir()

    def state(self) -> dict[str, str] | None:
        """systemd's words about the unit; None where no systemd runs."""
        text = self.control("show", self.unit, f"--property={','.join(_SHOWN)}")
        if text is None:
            return None
        pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
        return {name: value for name, _, value in pairs}

    def _require_ours(self) -> None:
        if self.file.exists() and not self.file.read_text(encoding="utf-8", errors="replace").startswith(
            MARK
        ):
            raise UsageError(
                f"{self.file} was not written by this command", remedy="remove it yourself, or --name ANOTHER"
            )
