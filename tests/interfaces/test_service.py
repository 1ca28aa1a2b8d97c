"""`strata service`: the unit's text against systemd's rules, and what install, status and uninstall do."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.config import Override, load_config
from strata.errors import StrataError, UsageError
from strata.interfaces.cli import run
from strata.interfaces.hardware import hardware, remembered_machine
from strata.interfaces.planning import plan_model
from strata.interfaces.systemd.describe import describe, nodes_of
from strata.interfaces.systemd.installation import Installation
from strata.interfaces.systemd.notify import Notifier
from strata.interfaces.systemd.unit import MARK, Nodes, UnitSpec, quoted, unit_text

_TWO_SOCKETS = "rtx3090-2x-e5-2680v4"
_ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "my server.yaml"
    file.write_text("model: {path: demo}\nserver: {drain_seconds: 7, stall_seconds: 11}\n")
    return file


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that writes down what it is asked, and a user's manager that seems to run."""
    log, program = tmp_path / "asked", tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    state = (
        "printf 'ActiveState=active\\nSubState=running\\nStatusText=serving x=1\\nMainPID=7\\nNRestarts=2\\n'"
    )
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *show*) {state};; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "systemd").mkdir()
    return log


def keys(text: str) -> dict[str, list[str]]:
    """The values of every key; comments are none."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def spec(**changes: Any) -> UnitSpec:
    default: dict[str, Any] = {
        "description": "Strata: a model",
        "command": ("/bin/true", "serve", "--config", "/etc/a b%c.yaml"),
        "nodes": Nodes(why_not="none"),
        "user": getpass.getuser(),
        "read": (Path("/etc/a b%c.yaml"),),
        "write": (),
        "local": True,
        "low_port": False,
        "gpu": False,
        "drain_seconds": 30,
        "stall_seconds": 60,
    }
    return UnitSpec(**{**default, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"user": ""},
        {"gpu": True, "local": False, "low_port": True, "write": (Path("/srv/a store"),)},
        {"nodes": Nodes((0, 1), (0, 1), "/bin/true"), "read": (Path("/home/a"), Path("/tmp/b"))},
    ],
)
def test_systemd_finds_nothing_wrong(changes: dict[str, Any], tmp_path: Path) -> None:
    if _ANALYZE is None:
        pytest.skip("systemd-analyze is not installed: Debian's package systemd")
    unit = tmp_path / "strata-test.service"
    unit.write_text(unit_text(spec(**changes)))
    own = [] if spec(**changes).user else ["--user"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [_ANALYZE, *own, "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and str(unit) not in done.stderr, done.stderr


def test_the_unit_follows_the_configuration(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["service", "install", "--config", str(config_file), "--run-as", getpass.getuser(), "--print"]
    assert run(command) == 0
    text = capsys.readouterr().out
    found = keys(text)
    assert text.startswith(MARK) and found["Type"] == ["notify"] and found["User"] == [getpass.getuser()]
    assert found["ExecStart"][0].endswith(f'-m strata serve --config "{config_file}"')
    assert int(found["TimeoutStopSec"][0]) > 7  # drain_seconds
    assert int(found["WatchdogSec"][0]) > 11  # stall_seconds
    assert found["RestartPreventExitStatus"] == ["2"] and found["Restart"] == ["on-failure"]
    assert found["LimitMEMLOCK"] == ["infinity"] and found["NoNewPrivileges"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"] and found["WantedBy"] == ["multi-user.target"]
    assert "PrivateTmp" not in found, "the configuration lies below /tmp"


def test_what_a_users_manager_cannot_do_is_not_asked_of_it(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["service", "install", "--config", str(config_file), "--user", "--print"]) == 0
    found = keys(capsys.readouterr().out)
    assert not {"User", "ProtectSystem", "ProtectHome", "CapabilityBoundingSet", "IPAddressDeny"} & set(found)
    assert found["WantedBy"] == ["default.target"] and found["NoNewPrivileges"] == ["yes"]


def test_who_reaches_it_and_what_it_writes(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model: {{path: demo, cache_dir: {tmp_path}/cache}}\nserver: {{host: 0.0.0.0, port: 80}}\n"
    )
    config, machine = load_config(str(file), []), remembered_machine()
    described = describe(config, plan_model(config, machine), machine, "root")
    found = keys(unit_text(described))
    assert "IPAddressDeny" not in found and found["After"] == ["network-online.target"]
    assert found["ReadWritePaths"] == [f"-{tmp_path}/cache"]
    assert found["CapabilityBoundingSet"] == ["CAP_NET_BIND_SERVICE"]
    home = unit_text(spec(read=(Path("/home/somebody/model"),)))
    assert keys(home)["ProtectHome"] == ["read-only"] and keys(unit_text(spec()))["ProtectHome"] == ["yes"]
    assert "PrivateDevices" not in keys(unit_text(spec(gpu=True)))


def test_memory_nodes() -> None:
    machine = hardware(_TWO_SOCKETS)
    config = load_config(None, [Override("model.path", "demo", "test")])
    plan = plan_model(config, machine)
    assert len(machine.nodes) == 2
    nodes = nodes_of(plan, machine, "/usr/bin/numactl")
    used = ",".join(map(str, sorted({threads.node for threads in plan.threads})))
    assert nodes.prefix()[:2] == ["/usr/bin/numactl", f"--cpunodebind={used}"]
    assert nodes.prefix()[2].startswith("--membind=") and set(nodes.cpus) <= set(nodes.memory)
    assert "not installed" in nodes_of(plan, machine, None).why_not
    text = unit_text(spec(nodes=nodes))
    assert keys(text)["ExecStart"][0].startswith("/usr/bin/numactl --cpunodebind=")
    small = remembered_machine()
    if len(small.nodes) == 1:
        assert nodes_of(plan_model(config, small), small, "/usr/bin/numactl").prefix() == []


@given(
    st.lists(st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"]) | st.just(" ")), min_size=1)
)
def test_a_command_line_comes_back_as_it_was(words: list[str]) -> None:
    """shlex reads quotes and backslashes as systemd does inside double quotes; then % and $ are halved."""
    found = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(quoted(words))]
    assert found == words


def test_dollars_are_doubled_where_systemd_reads_variables_only() -> None:
    text = unit_text(spec(write=(Path("/srv/$cache"),)))
    assert '"-/srv/$cache"' in text
    assert quoted(["run", "$HOME"]) == 'run "$$HOME"'


def test_a_full_disk_leaves_nothing_half_written(
    systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    installation = Installation("strata", own=True)

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="No space left on device"):
        installation.write(f"{MARK}\n")
    assert list(installation.file.parent.iterdir()) == []


@pytest.mark.parametrize("microseconds", ["9" * 5000, "9" * 400, "-1", "x", "\u0661"])
def test_a_watchdog_time_that_is_none_is_left_alone(microseconds: str) -> None:
    assert Notifier.from_environment({"WATCHDOG_USEC": microseconds}).watchdog_seconds is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "@",
        "@" + "x" * 300,
        "/" + "x" * 300,
        "/no/such/folder/socket",
        "relative",
        "vsock:2:1",
        "/dev/null",
        "\udcff",
    ],
)
def test_a_manager_that_cannot_be_reached_is_no_reason_to_stop(address: str) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
    assert notifier.active == bool(address)
    assert not notifier.send("READY=1") and not notifier.extend_start(5.0)


def test_a_socket_that_may_not_be_written_or_is_full(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        notifier = Notifier(str(path))
        assert (
            notifier.send("STATUS=a\nREADY=1", "X=\ud800") and listener.recv(100) == b"STATUS=a READY=1\nX=?"
        )
        while notifier.send("WATCHDOG=1"):
            pass  # returns at once when nobody reads
    assert not notifier.send("READY=1")
    path.unlink()
    os.mkfifo(path)
    assert not notifier.send("READY=1")


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a%h",
        "$HOME",
        "a\nb",
        "strata\n",
        "\u0661",
        "../x",
        "/x",
        "a/b",
        "",
        ".",
        "-x",
        "x.service",
        "a" * 65,
        "a@b",
        "\x7f",
        "a\\x2fb",
    ],
)
def test_names_that_no_unit_has(name: str) -> None:
    with pytest.raises(UsageError, match="no name for a service"):
        Installation(name, own=True)


@pytest.mark.parametrize(
    "name",
    [
        "a b.yaml",
        "100%h %i.yaml",
        "$HOME ${X} $$.yaml",
        "k\u00f6nfig \U0001f600.yaml",
        "\"q\" 'r' \\n;.yaml",
        "-x.yaml",
    ],
)
def test_odd_paths_come_back_as_they_were(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named absolutely and relative to where one stands; systemd starts it from /."""
    (tmp_path / name).write_text("model: {path: demo}\n")
    monkeypatch.chdir(tmp_path)
    texts = []
    for asked in (str(tmp_path / name), f"./{name}"):
        assert run(["service", "install", "--config", asked, "--user", "--print"]) == 0
        texts.append(capsys.readouterr().out)
    (line,) = keys(texts[0])["ExecStart"]
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]
    assert texts[0] == texts[1] and words[-2:] == ["--config", str(tmp_path / name)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a\nb.yaml", "control"),
        ("b\udcff.yaml", "control"),
        ("folder", "folder"),
        ("missing.yaml", "missing.yaml"),
        ("empty.yaml", "names no model"),
        ("", ""),
    ],
)
def test_configurations_that_no_service_can_have(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.yaml").write_text("")
    if said == "control":
        (tmp_path / name).write_text("model: {path: demo}\n")
    assert (
        run(["service", "install", "--config", str(tmp_path / name) if name else "", "--user", "--print"])
        == 2
    )
    output = capsys.readouterr()
    assert said in output.err and "Traceback" not in output.err and not output.out


def test_a_relative_configuration_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the XDG specification asks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert Installation("x", own=True).file == tmp_path / ".config/systemd/user/x.service"


def test_a_models_name_adds_no_lines() -> None:
    text = unit_text(spec(description="a\nExecStartPre=/bin/evil\\"))
    assert not [line for line in text.splitlines() if line.startswith("ExecStartPre")]
    assert not any(line.endswith("\\") for line in text.splitlines())
    with pytest.raises(UsageError, match="control"):
        quoted(["a\nb"])


def test_install_status_uninstall(
    config_file: Path, systemctl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "talk.service"
    which = ["--user", "--name", "talk"]
    assert run(["service", "status", *which]) == 1
    assert run(["service", "uninstall", *which]) == 2
    assert "not installed" in capsys.readouterr().err
    for _ in range(2):  # again: it is replaced
        assert run(["service", "install", "--config", str(config_file), *which, "--now"]) == 0
    assert unit.read_text().startswith(MARK) and [*unit.parent.iterdir()] == [unit]
    capsys.readouterr()
    assert run(["service", "status", *which, "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["state"]["StatusText"] == "serving x=1" and state["unit"] == str(unit)
    assert run(["service", "uninstall", *which]) == 0
    assert not unit.exists()
    started = ["--user daemon-reload", "--user enable talk.service", "--user restart talk.service"]
    asked = systemctl.read_text().splitlines()
    assert asked[:3] == started and asked[3:6] == started
    assert asked[-2:] == ["--user disable --now talk.service", "--user daemon-reload"]


def test_a_start_that_takes_longer_than_systemctl_is_waited_for(systemctl: Path, tmp_path: Path) -> None:
    """A first start imports the model for minutes; that is no crash of this command."""
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(StrataError, match=r"(?s)restart strata\.service has not come back.*service status"):
        Installation("strata", own=True, seconds=0.1).control("restart", "strata.service")


def test_somebody_elses_unit_stays(config_file: Path, systemctl: Path, tmp_path: Path) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "strata.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    for command in (["install", "--config", str(config_file)], ["uninstall"]):
        assert run(["service", *command, "--user"]) == 2
    assert unit.read_text() == "[Service]\nExecStart=/bin/true\n" and not systemctl.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run-as", "no-such-account"], "no-such-account"),
        ([], "whose rights"),
        (["--user", "--run-as", "root"], "exclude"),
        (["--user", "--name", "a/b"], "a/b"),
        (["--user", "--now"], "--print changes nothing, --now starts"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    said: str,
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SUDO_USER", raising=False)
    assert run(["service", "install", "--config", str(config_file), "--print", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_systemd_the_unit_is_written(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert run(["service", "install", "--config", str(config_file), "--user"]) == 0
    assert "no systemd runs here" in capsys.readouterr().out
    assert run(["service", "status", "--user"]) == 1
    assert (tmp_path / "systemd" / "user" / "strata.service").exists()
