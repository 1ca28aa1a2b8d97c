"""Where the server listens, and who may come in."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from strata.config import Config
from strata.errors import ConfigError, UsageError
from strata.interfaces.server.log import RequestLog

KEY_VARIABLE = "STRATA_API_KEY"
_MAX_KEY_FILE = 1 << 20


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises UsageError when the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason}", remedy="--port N (0: any free one) or --host"
        ) from error
    return listener


def api_keys(config: Config) -> list[str]:
    """From the environment and the file. Raises ConfigError for a file without a key."""
    keys = [os.environ.get(KEY_VARIABLE, "").strip()]
    name = config.server.api_key_file
    if name:
        with Path(name).open("rb") as file:
            lines = file.read(_MAX_KEY_FILE).decode("utf-8", "replace").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(
                f"{name}: no key in it ({config.where('server.api_key_file')})", remedy="write one key a line"
            )
        keys += found
    return [key for key in keys if key]


def announce(log: RequestLog, config: Config, listener: socket.socket, keys: Sequence[str]) -> None:
    """Log the address, and warn where strangers may use the server."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.event("listening", url=f"http://{shown}:{port}", key="needed" if keys else "none")
    if not keys and not is_loopback(config.server.host):
        log.warning(f"everybody who reaches {host} may use this server: set {KEY_VARIABLE}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    return host in ("localhost", "::1") or host.startswith("127.")
