"""The command line as scripts see it: exit codes, stdout and stderr, no traceback (case-21, 26, 31, 45)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, Result, finish, start
from tiny_checkpoint import CONTEXT

from strata import __version__
from strata.interfaces import cli

DEMO_YAML = str(ROOT / "configs" / "demo.yaml")
COMMANDS = (
    "run",
    "serve",
    "convert",
    "inspect",
    "plan",
    "simulate",
    "verify",
    "doctor",
    "bench",
    "eval",
    "trace",
)


def test_help_starts_light() -> None:
    """`strata --help` imports click, yaml and few modules of its own, nothing heavy."""
    code = (
        "import sys; before = set(sys.modules); from strata.interfaces.cli import run; run(['--help']);"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    packages = {name.partition(".")[0] for name in imported if "cython" not in name}  # yaml's own
    assert packages - sys.stdlib_module_names <= {"strata", "click", "yaml", "_yaml"}
    assert all(name in done.stdout for name in COMMANDS)
    assert len(imported) < 250  # about 110


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(strata: Any, name: str) -> None:
    result = strata(name, "--help")
    assert result.code == 0
    assert "Example" in result.out and f"strata {name}" in result.out and "--debug" in result.out


def test_version(strata: Any) -> None:
    assert strata("--version").out == f"strata {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'.\n"),
        (["doctr"], "No such command 'doctr'. Did you mean 'doctor'?"),
        (["run", "demo", "-m", "smollm2"], "two models: demo and --model smollm2"),
        (["run", "/nowhere", "--prompt", "x"], "/nowhere: no such file or directory"),
        (
            ["run", str(ROOT / "configs/demo.yaml"), "--prompt", "x"],
            "demo.yaml is a configuration, not a model",
        ),
        (["bench", DEMO_YAML], f"remedy: --config {DEMO_YAML}"),
        (["run", "demo", "--chat-template", "/dev/null", "--prompt", "x"], "the chat template is not a file"),
        (["run", "--nonsense"], "No such option"),
        (["run", "demo", "-ngl", "99"], "remedy: -ngl is llama.cpp's: device.use"),
        (["bench", "demo", "--n-gpu-layers=9"], "remedy: --n-gpu-layers is llama.cpp's"),
        (["serve", "demo", "-ngld", "99"], "remedy: -ngld is llama.cpp's: name the draft with -md"),
        (["run", "demo", "--draft-min", "2"], "remedy: --draft-min is llama.cpp's: drafts are as long"),
        (["serve", "demo", "--speculative-config", "{}"], "remedy: --speculative-config is vLLM's: -md PATH"),
        (["run", "-hf", "a/b"], "remedy: -hf is llama.cpp's: Strata downloads nothing"),
        (["run", "--prompt", "x"], "no model is given"),
        (["run", "--prompt", "  ", "-m", "demo"], "--prompt is empty"),
        (["run", "--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["run", "--set", "kv.dtyp=int8"], "did you mean 'dtype'"),
        (["run", "--temp", "hot"], "--temperature: sampling.temperature: 'hot' is not a number"),
        (["run", "--top-p", "1.5"], "out of range; allowed: 0 to 1"),
        (["run", "demo", "--raw", "--system", "x"], "--system has no effect with --raw"),
        (["run", "demo", "--raw", "--chat-template", "x"], "--chat-template has no effect with --raw"),
        (["run", "demo", "--serve", "--system", "x"], "--system has no effect with --serve"),
        (["run", "demo", "--no-draft", "-md", "demo-draft"], "--model-draft has no effect with --no-draft"),
        (["run", "demo", "--draft", "0", "-md", "demo-draft"], "--model-draft has no effect with --draft 0"),
        (["plan", "demo", "--depth", "2048"], "--depth is 2048, the context holds 2048 tokens"),
        (["serve", "demo", "--no-draft", "--draft", "4"], "has no effect with --no-draft"),
        (["run", "--threads", "0"], "--threads: backend.threads: '0' is out of range"),
        (["serve", "demo", "--api-key-file", ""], "--api-key-file is followed by an empty value"),
        (["serve", "demo", "--host="], "--host is followed by an empty value"),
        (["eval", "kv", "demo", "--config", ""], "--config is followed by an empty value"),
        (["eval", "compare", "demo", ""], "no model is given"),
        (["run", "--stop", ""], "sampling.stop: '' is empty"),
        (["convert", "x"], "Missing option '--out'"),
        (["convert", "/nowhere", "--out", "x", "--experts", "w5"], "unknown weight format 'w5'"),
        (["inspect", "/nowhere"], "/nowhere: no such file or directory"),
        ([], "Usage"),
    ],
)
def test_usage_mistakes_exit_with_2(strata: Any, arguments: list[str], message: str) -> None:
    result = strata(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nowhere",), "error: /nowhere: no such file or directory"),
        (("demo", "-md", "/nowhere"), "error: the draft (--model-draft): /nowhere: no such file"),
        (("demo", "-md", "STORE"), "error: the draft STORE has another tokenizer"),
    ],
)
def test_a_server_says_nothing_before_it_knows_its_models(
    strata: Any, store: Path, arguments: tuple[str, ...], message: str
) -> None:
    words = (str(store) if word == "STORE" else word for word in arguments)
    result = strata("serve", *words, "--port", 0)
    assert result.code == 2 and result.err.startswith(message.replace("STORE", str(store)))


def test_a_stores_manifest_stands_for_the_store(strata: Any, store: Path) -> None:
    for command in ("verify", "inspect", "plan"):
        assert strata(command, store / "manifest.json").code == 0
    asked = ("-md", store / "manifest.json", "--prompt", "hi", "-n", 2, "--temp", 0)
    assert strata("run", store / "manifest.json", *asked).code == 0


def test_flags_are_options_of_the_configuration(strata: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("sampling:\n  top_k: 3\n  temperature: 0.5\nkv:\n  size: 2GB\n")
    result = strata(
        "run", "--config", file, "--temp", "0.25", "-n", "7", "--stop", "a", "--stop", "b", "--show-config"
    )
    assert result.code == 0
    assert "sampling.top_k = 3" in result.out
    assert "sampling.temperature = 0.25    # --temperature" in result.out
    assert "sampling.max_tokens = 7" in result.out
    assert 'sampling.stop = ["a", "b"]' in result.out
    assert "kv.size = 1.9 GiB (2000000000 bytes)" in result.out


@pytest.fixture
def ask(strata: Any, store: Path) -> Any:
    """One answer of the tiny model, greedy unless told otherwise."""

    def call(*arguments: str) -> Result:
        return strata("run", "-m", store, "--temp", "0", "-t", "1", *arguments)

    return call


def test_one_answer_on_stdout_and_statistics_on_stderr(ask: Any) -> None:
    result = ask("--prompt", "hello", "-n", "5")
    assert result.code == 0
    assert result.out.endswith("\n") and len(result.out) > 1
    assert "tokens/s" in result.err and "5 answer" in result.err and "GB/s" in result.err


def test_json_has_the_answer_and_its_figures(ask: Any) -> None:
    text = ask("--prompt", "hello", "-n", "5").out
    result = ask("--prompt", "hello", "-n", "5", "--json")
    report = json.loads(result.out)
    assert report["text"] + "\n" == text and result.err == ""
    assert report["finish_reason"] == "length" and report["answer_tokens"] == 5
    assert report["decode"]["seconds"] > 0 and report["memory_bandwidth"] > 0
    assert report["model"] == "tiny-moe"
    assert report["kv_place"].partition(" in ")[2].partition(" pages")[0] in ("plain", "transparent huge")
    assert report["decode"]["tokens_per_second"] == report["decode"]["tokens"] / report["decode"]["seconds"]


def test_nothing_decoded_is_compared_with_nothing(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's pass gave the one token: reading a gigabyte afterwards would tell nobody anything."""
    monkeypatch.setattr("strata.hardware.bandwidth.read_bandwidth", lambda *_: 1 // 0)
    report = json.loads(ask("--prompt", "hello", "-n", "1", "--json").out)
    assert report["answer_tokens"] == 1 and report["memory_bandwidth"] == 0


def test_the_same_seed_gives_the_same_text(ask: Any) -> None:
    """case-26: same seed, same text; without a seed it differs."""
    hot = ("--prompt", "hello", "-n", "24", "--temp", "1.5", "--top-k", "0")
    seeded = [ask(*hot, "--seed", "42").out for _ in range(2)]
    assert seeded[0] == seeded[1] != ask(*hot, "--seed", "43").out
    assert ask(*hot).out != ask(*hot).out


def test_stop_texts_end_the_answer(ask: Any) -> None:
    """case-15: a stop text that may lie across tokens, with finish_reason stop."""
    whole = ask("--prompt", "hello", "-n", "30", "--raw").out.rstrip("\n")
    stop = whole[4:6]
    cut = ask("--prompt", "hello", "-n", "30", "--raw", "--stop", stop).out.rstrip("\n")
    assert cut == whole[: whole.index(stop)]
    report = json.loads(ask("--prompt", "hello", "-n", "30", "--raw", "--stop", stop, "--json").out)
    assert report["finish_reason"] == "stop" and report["text"] == cut


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_answers_follow_a_schema_or_a_grammar(ask: Any, tmp_path: Path, raw: tuple[str, ...]) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.gbnf"
    schema.write_text('{"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}')
    grammar.write_text("root ::= [a-c] [0-9]{3}")
    value = json.loads(ask("--prompt", "hello", "--json-schema", schema, *raw).out)
    assert isinstance(value, list) and len(value) <= 2 and set(value) <= {"a", 1}
    text = ask("--prompt", "hello", "--grammar", grammar, *raw).out.strip()
    assert text[0] in "abc" and text[1:].isdigit() and len(text) == 4


def test_grammars_that_cannot_be_used(ask: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for content, option, message in (
        ('{"type": "mystery"}', "--json-schema", "Invalid type"),
        ("{", "--json-schema", "is not JSON"),
        ("[]", "--json-schema", "is no JSON object"),
        ("????", "--grammar", "grammar"),
    ):
        file.write_text(content)
        result = ask("--prompt", "hello", option, file)
        assert result.code != 0 and not result.out and message in result.err
    assert "is not there" in ask("--prompt", "x", "--grammar", tmp_path / "none").err
    assert "exclude each other" in ask("--prompt", "x", "--grammar", file, "--json-schema", file).err


def test_raw_and_chat_differ_in_their_prompt(ask: Any) -> None:
    assert "5 prompt," in ask("--prompt", "hello", "--raw", "-n", "1").err
    assert "5 prompt," not in ask("--prompt", "hello", "-n", "1").err


def test_a_huge_prompt_is_not_read_to_its_end(store: Path) -> None:
    """case-21: 50 MB are refused in seconds; encoding them whole would take a minute and gigabytes."""
    result = finish(start("run", "-m", store, stdin=subprocess.PIPE), b"ab c\n" * 10_000_000)
    assert (result.code, result.out) == (1, "")
    assert f"the prompt has at least {16 * CONTEXT} tokens but the context holds {CONTEXT}" in result.err


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 15 * CONTEXT])
def test_a_prompt_beyond_the_context_is_refused_before_any_output(ask: Any, length: int) -> None:
    """case-21: both numbers, exit code 1, empty stdout."""
    result = ask("--raw", "--prompt", "x" * length)
    assert (result.code, result.out) == (1, "")
    assert f"the prompt has {length} tokens but the context holds {CONTEXT}" in result.err


def test_a_full_context_ends_the_answer_cleanly(ask: Any) -> None:
    """case-31: generation stops at the context, says so and exits with 0."""
    result = ask("--raw", "--prompt", "x" * 40, "-c", "64", "--ignore-eos")
    assert result.code == 0
    assert "the context of 64 tokens is full" in result.err and "24 answer; 64 of 64" in result.err


def test_a_context_beyond_the_model_names_its_origin(ask: Any) -> None:
    result = ask("--prompt", "x", "-c", "100000")
    assert result.code == 2
    assert "100000" in result.err and str(CONTEXT) in result.err and "--ctx-size" in result.err


def test_piped_input_is_one_prompt(store: Path) -> None:
    """case-45: all of stdin is one prompt; bytes that are not UTF-8 are replaced with a note."""
    process = start("run", "-m", store, "--raw", "-n", "2", stdin=subprocess.PIPE)
    result = finish(process, b"two\nlines \xff\n")
    assert result.code == 0 and result.out
    assert "1 bytes of the input are not UTF-8" in result.err
    assert "13 prompt" in result.err  # U+FFFD is three bytes, the last newline is echo's


@pytest.mark.parametrize("data", [b"", b"\n", b" \n\n"])
def test_empty_input_loads_nothing(data: bytes) -> None:
    """case-45: EOF is exit code 0; the model, which does not even exist, is not asked."""
    result = finish(start("run", "-m", "/nowhere", stdin=subprocess.PIPE), data)
    assert (result.code, result.out, result.err) == (0, "", "")


def test_closed_input_is_empty_input() -> None:
    result = finish(start("run", "-m", "/nowhere", preexec_fn=lambda: os.close(0)))
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("stream", [1, 2])
def test_a_closed_output_costs_only_what_goes_there(store: Path, stream: int) -> None:
    arguments = ("run", "-m", store, "--prompt", "x", "-n", "2", "--temp", "0")
    process = start(*arguments, stdin=subprocess.DEVNULL, preexec_fn=lambda: os.close(stream))
    result = finish(process)
    assert (result.code, bool(result.out), "tokens/s" in result.err) == (0, stream != 1, stream != 2)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "-m", "STORE", "--prompt", "x", "-n", "2"]])
def test_a_full_disk_is_one_line_and_exit_code_1(store: Path, arguments: list[str]) -> None:
    line = [sys.executable, "-m", "strata", *(str(store) if a == "STORE" else a for a in arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            line,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_reader_that_leaves_is_no_error(store: Path) -> None:
    """case-45: `strata ... | head -1` is quiet."""
    process = start("run", "-m", store, "--raw", "--prompt", "x", "--ignore-eos", stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert "rror" not in error and "Traceback" not in error


def test_ctrl_c_ends_an_answer_with_130(store: Path) -> None:
    arguments = ("--raw", "--prompt", "x", "--ignore-eos", "--set", "backend.name=reference")
    process = start("run", "-m", store, *arguments, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130


def test_ctrl_c_during_the_first_imports_is_silent(tmp_path: Path) -> None:
    """The signal meets Python in the middle of importing click, which takes tens of milliseconds."""
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "strata", "run"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert (result.code, result.err) == (-signal.SIGINT, "")  # which a shell shows as 130


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As `nohup` and shells in scripts start programs."""
    code = (
        "import signal, strata.__main__ as m; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "try: m.main()\n"
        "finally: print(signal.getsignal(signal.SIGINT).name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("SIG_IGN\n")


def test_unexpected_errors_are_one_line_and_debug_shows_more(
    strata: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise ZeroDivisionError("a defect\x1b[2J")

    monkeypatch.setattr("strata.interfaces.inspection.inspect_path", fail)
    result = strata("inspect", "x")
    assert result.code == 1
    assert "internal error: ZeroDivisionError: a defect\\x1b[2J" in result.err
    assert cli.run(["inspect", "x"], debug=True) == 1
    assert "Traceback" in capfd.readouterr().err
