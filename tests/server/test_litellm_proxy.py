"""configs/litellm_proxy.yaml: what it says, and where the proxy is installed, two servers behind it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

_FILE = Path(__file__).parents[2] / "configs" / "litellm_proxy.yaml"
_SECONDS = 240.0


def test_what_it_says() -> None:
    """Several servers under one name, keys from the environment only."""
    config = yaml.safe_load(_FILE.read_text())
    assert set(config) == {"model_list", "router_settings", "litellm_settings", "general_settings"}
    assert len(config["model_list"]) > 1
    for entry in config["model_list"]:
        given = entry["litellm_params"]
        assert entry["model_name"] == "strata" and given["model"].startswith("openai/")
        assert given["api_base"].endswith("/v1") and given["api_key"] == "os.environ/STRATA_API_KEY"
    assert config["general_settings"]["master_key"].startswith("os.environ/")


def _ask(url: str, stream: bool) -> bytes:
    body = {
        "model": "strata",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "stream": stream,
    }
    headers = {"content-type": "application/json", "authorization": "Bearer sk-proxy"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
        data: bytes = reply.read()
    return data


def _until_it_listens(url: str, proxy: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


@pytest.mark.slow
def test_the_proxy(tmp_path: Path) -> None:
    """Whole and streamed; when one server is killed, the other one answers all."""
    program = shutil.which("litellm")
    if program is None:
        pytest.skip("the LiteLLM proxy is not installed: pip install 'litellm[proxy]'")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"STRATA_API_KEY": "k", "LITELLM_MASTER_KEY": "sk-proxy", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    }
    config = yaml.safe_load(_FILE.read_text())
    with ExitStack() as stack:
        servers = [stack.enter_context(_Server()) for _ in config["model_list"]]
        for entry, server in zip(config["model_list"], servers, strict=True):
            entry["litellm_params"]["api_base"] = server.url + "/v1"
        file, log = tmp_path / "proxy.yaml", tmp_path / "log"
        file.write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        url, command = f"http://127.0.0.1:{port}", [program, "--config", str(file), "--port", str(port)]
        with log.open("wb") as out:
            proxy = subprocess.Popen(
                [*command, "--host", "127.0.0.1"], stdout=out, stderr=out, env=environment
            )
        stack.callback(proxy.wait)
        stack.callback(proxy.kill)
        _until_it_listens(url, proxy, log)
        assert json.loads(_ask(url, False))["choices"][0]["message"]["content"]
        assert _ask(url, True).rstrip().endswith(b"data: [DONE]")
        servers[0].process.kill()
        servers[0].process.wait()
        assert all(json.loads(_ask(url, False))["choices"] for _ in range(6))


class _Server:
    """A `strata serve` on a port of its own."""

    def __enter__(self) -> _Server:
        command = [sys.executable, "-m", "strata", "serve", "demo", "--threads", "1", "--port", "0"]
        environment = {**os.environ, "STRATA_API_KEY": "k"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        found = re.search(r"url=(\S+)", self.process.stderr.readline())
        assert found and "ready" in self.process.stderr.readline()
        self.url = found[1]
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()
