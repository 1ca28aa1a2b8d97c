"""What /openapi.json promises, tried out with made-up requests (scripts/schema_check.py, a small number)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_made_up_request_is_a_fault_of_the_server() -> None:
    """A long run: `scripts/schema_check.py --examples 2000`."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    options = ["--port", "0", "--context", "48", "--threads", "1"]
    command = [sys.executable, "-m", "strata", "serve", "demo", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"url=(\S+)", server.stderr.readline())
        assert found and "ready" in server.stderr.readline()
        try:
            script = [sys.executable, str(_ROOT / "scripts" / "schema_check.py"), "--url", found[1]]
            done = subprocess.run(
                [*script, "--examples", "6"], capture_output=True, text=True, timeout=250, cwd=_ROOT
            )
        finally:
            server.terminate()
            lines = server.communicate(timeout=60)[1]
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    requests = re.search(r"^(\d+) requests, 0 operations failed", done.stdout, re.MULTILINE)
    assert requests and int(requests[1]) > 20
    assert "Traceback" not in lines and "error  detail" not in lines
