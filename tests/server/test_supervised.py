"""The process under a manager: READY, WATCHDOG and STOPPING; a new start after kill -9; a step that hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from supervisor import Supervisor

from strata.interfaces.server.heartbeat import Heartbeat
from strata.interfaces.server.log import RequestLog
from strata.interfaces.server.worker import State
from strata.interfaces.systemd.notify import Notifier

openai = pytest.importorskip("openai")

# `strata serve` whose steps never end once the file exists.
_HANGS = """
import sys, threading
from pathlib import Path
from strata.engine.engine import Engine
step = Engine.step
def hanging(engine):
    if Path(sys.argv[1]).exists():
        threading.Event().wait()
    return step(engine)
Engine.step = hanging
from strata.interfaces.cli import main
main(sys.argv[2:])
"""


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    running: list[Supervisor] = []

    def start(*command: str) -> Supervisor:
        options = ["serve", "demo", "--threads", "1", "--port", str(_free_port())]
        options += ["--set", "server.stall_seconds=1", "--set", "server.warm_up=false"]
        running.append(Supervisor([sys.executable, *command, *options], tmp_path / "notify", 0.4))
        return running[-1]

    yield start
    for supervisor in running:
        supervisor.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _url(supervisor: Supervisor) -> str:
    command: Any = supervisor.process.args
    return f"http://127.0.0.1:{command[command.index('--port') + 1]}"


def _stream(supervisor: Supervisor) -> Any:
    client = openai.OpenAI(base_url=f"{_url(supervisor)}/v1", api_key="x", max_retries=0, timeout=60)
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})


def _health(supervisor: Supervisor) -> Any:
    try:
        with urllib.request.urlopen(f"{_url(supervisor)}/health", timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as answer:  # 503: it is not well
        return json.load(answer)


def test_a_life_with_a_kill_in_it(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise("-m", "strata")
    supervisor.wait_for(lambda: supervisor.said("READY=1") == 1)
    assert supervisor.said("EXTEND_TIMEOUT_USEC=") and supervisor.said("STATUS=opening the model")
    fed = supervisor.said("WATCHDOG=1")
    supervisor.wait_for(lambda: supervisor.said("WATCHDOG=1") > fed + 3)  # nothing to do: it lives
    fed, stream = supervisor.said("WATCHDOG=1"), _stream(supervisor)
    next(iter(stream))
    supervisor.wait_for(lambda: supervisor.said("WATCHDOG=1") > fed + 3)  # tokens come
    assert supervisor.said("STATUS=serving strata-demo: 1 running, 0 waiting")
    killed = supervisor.kill()
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    supervisor.wait_for(lambda: supervisor.process.pid != killed and supervisor.said("READY=1") == 1)
    assert supervisor.exit_codes == [-signal.SIGKILL]
    next(iter(_stream(supervisor)))  # the port is its own again
    assert not supervisor.said("STOPPING=1")
    supervisor.kill(signal.SIGTERM)
    supervisor.wait_for(lambda: len(supervisor.exit_codes) == 2)
    assert supervisor.exit_codes[1] == 0 and supervisor.said("STOPPING=1") == 1


def test_a_step_that_hangs_is_not_fed(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    """The event loop lives and /health answers; what is missing is progress."""
    flag = tmp_path / "hang"
    supervisor = supervise("-c", _HANGS, str(flag))
    supervisor.wait_for(lambda: supervisor.said("READY=1") == 1)
    stream = iter(_stream(supervisor))
    next(stream)
    flag.touch()
    supervisor.wait_for(lambda: _health(supervisor)["status"] == "degraded")
    hung, fed = supervisor.process.pid, supervisor.said("WATCHDOG=1")
    silent = _health(supervisor)["seconds_since_progress"]
    supervisor.wait_for(lambda: _health(supervisor)["seconds_since_progress"] > silent + 0.5)
    assert supervisor.said("WATCHDOG=1") <= fed + 1  # four times within 0.4 s while all was well
    flag.unlink()
    supervisor.kill(signal.SIGABRT)  # what the manager does now
    supervisor.wait_for(lambda: supervisor.process.pid != hung and supervisor.said("READY=1") == 1)
    assert supervisor.exit_codes == [-signal.SIGABRT]


def test_what_is_fed() -> None:
    """Once for every look with progress since the last; always while there is nothing to do."""
    sent: list[str] = []
    notifier: Any = SimpleNamespace(send=lambda *said: sent.extend(said), active=True, watchdog_seconds=1.0)
    thread: Any = SimpleNamespace(state=State.READY, open={}, last_progress=0.0, running=0, waiting=0)
    heartbeat = Heartbeat(notifier, thread, lambda: "m")

    def fed() -> bool:
        sent.clear()
        heartbeat.beat()
        return "WATCHDOG=1" in sent

    assert fed() and fed()
    thread.open = {"request": None}
    assert not fed()
    thread.last_progress = float("inf")
    assert fed()
    thread.last_progress = 0.0
    assert not fed() and not fed()
    thread.open = {}
    assert fed()
    thread.state = State.DEAD
    assert not fed()


def test_the_notifier_asks_the_environment() -> None:
    none = Notifier.from_environment({})
    assert not none.active and not none.send("READY=1")
    other = Notifier.from_environment(
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}
    )
    assert other.active and other.watchdog_seconds is None
    assert not other.send("READY=1")  # nobody listens any more, and nothing is raised
    environment = {"NOTIFY_SOCKET": "@strata-test", "WATCHDOG_USEC": "2500000", "HOME": "/"}
    ours = Notifier.from_environment(environment)
    assert ours.watchdog_seconds == 2.5 and environment == {"HOME": "/"}


def test_the_abstract_namespace() -> None:
    name = f"strata-test-{threading.get_native_id()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        assert Notifier("@" + name).send("STATUS=two\nlines", "READY=1")
        assert listener.recv(100) == b"STATUS=two lines\nREADY=1"


def test_the_journal_gets_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where stderr is what JOURNAL_STREAM names; every line of a traceback has one."""
    scope = {"path": "/v1/models", "method": "GET"}
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        for named in (f"{found.st_dev}:{found.st_ino}", "1:2"):
            monkeypatch.setenv("JOURNAL_STREAM", named)
            log = RequestLog(as_json=named == "1:2", stream=stream)
            log.request(scope, 200, 0.1, {})
            log.request(scope, 500, 0.1, {})
            log.warning("beware")
            log.fault("what\nwhere")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line[:3] for line in lines[:5]] == ["<6>", "<4>", "<4>", "<3>", "<3>"]
    assert [json.loads(line)["message"] for line in lines[5:7]] == ["request", "request"]
