"""Clients that people use, each in a process of its own (scripts/client_check.py), against one server."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "client_check.py"
_KEY = "a key"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(_KEY + "\n")
    command = [sys.executable, "-m", "strata", "serve", "demo", "--port", "0", "--api-key-file", str(keys)]
    with subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"url=(\S+)", process.stderr.readline())
        while found and "ready" not in (line := process.stderr.readline()):
            assert line, "it ended before it was ready"
        assert found
        yield found[1]
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("client", ["openai", "litellm", "llm"])
def test_client(client: str, url: str) -> None:
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"the client {client} is not installed")
    command = [sys.executable, str(_SCRIPT), "--url", url, "--key", _KEY, "--only", client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.match(rf"{client} [\d.]+: whole, stream", done.stdout)


def test_a_server_that_is_not_there_is_a_failure() -> None:
    """So that the check cannot pass by asking nobody."""
    command = [sys.executable, str(_SCRIPT), "--url", "http://127.0.0.1:9", "--only", "openai"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "FAILED" in done.stdout
