"""Clients that people use, against a running server: openai (any version since 1.x), litellm, llm.

    strata serve demo --port 8080 &
    python scripts/client_check.py --url http://127.0.0.1:8080
    venv-with-openai-1/bin/python scripts/client_check.py --url http://127.0.0.1:8080 --only openai

Needs nothing of Strata but the address: run it by the Python of each environment that has a client installed.
Clients that are not installed are named as such. Exit status 0 only if every check of every installed client
passed, and at least one was installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_SECONDS = 120.0


class Server:
    """Where it is. wrong_key: whether a wrong key must be refused."""

    def __init__(self, url: str, key: str) -> None:
        self.base = url.rstrip("/") + "/v1"
        self.key = key or "none"
        self.wrong_key = bool(key)
        self.model = ""


def expect(condition: object, what: str) -> None:
    """Raises AssertionError with the sentence, also where Python leaves `assert` out."""
    if not condition:
        raise AssertionError(what)


def check_openai(server: Server) -> list[str]:
    """The official client: whole, streamed, several choices, stop, logprobs, tools, errors, an abort."""
    import openai

    client = openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0, timeout=_SECONDS)
    asked: dict[str, Any] = {"model": server.model, "messages": _QUESTION, "temperature": 0, "max_tokens": 16}
    create = client.chat.completions.create
    whole = create(**asked)
    text = whole.choices[0].message.content
    expect(text and whole.usage.completion_tokens > 0, "an answer with its usage")
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    expect(streamed == text, f"streamed {streamed!r}, whole {text!r}")
    expect(chunks[-1].usage.total_tokens == whole.usage.total_tokens, "the same usage streamed")
    several = create(**{**asked, "n": 2, "temperature": 1, "seed": 5})
    expect(len(several.choices) == 2, "two choices")
    stopped = create(**asked, stop=[text[4:8]])
    expect(stopped.choices[0].message.content == text[:4], "cut before the stop text")
    probable = create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    expect(len(probable[0].top_logprobs) == 2 and probable[0].logprob <= 0, "logprobs")
    completed = client.completions.create(model=server.model, prompt="The capital of Italy is", max_tokens=4)
    expect(completed.choices[0].text, "a completion of a raw text")
    expect([m.id for m in client.models.list()] == [server.model], "the list of models")
    _openai_errors(openai, server, client, asked)
    with create(**asked, stream=True) as left:
        next(iter(left))
    with_raw = client.chat.completions.with_raw_response.create(**asked)
    expect(with_raw.parse().choices[0].message.content == text, "the same after an abort")
    names = "whole, stream, usage, n, stop, logprobs, completions, models, errors, abort, raw response"
    return names.split(", ")


def _openai_errors(openai: Any, server: Server, client: Any, asked: dict[str, Any]) -> None:
    for changes, kind in (({"temperature": 9}, "BadRequestError"), ({"messages": []}, "BadRequestError")):
        try:
            client.chat.completions.create(**{**asked, **changes})
        except getattr(openai, kind) as error:
            expect(error.body and error.body.get("message"), "the error's message")
        else:
            raise AssertionError(f"no {kind} for {changes}")
    if server.wrong_key:
        wrong = openai.OpenAI(base_url=server.base, api_key="wrong", max_retries=0)
        try:
            wrong.models.list()
        except openai.AuthenticationError:
            return
        raise AssertionError("a wrong key was taken")


def check_litellm(server: Server) -> list[str]:
    """As an OpenAI-compatible provider: whole, streamed, asynchronous, text, errors."""
    import asyncio

    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    import litellm

    litellm.telemetry = False
    asked: dict[str, Any] = {
        **{"model": f"openai/{server.model}", "api_base": server.base, "api_key": server.key},
        **{"messages": _QUESTION, "temperature": 0, "max_tokens": 16, "timeout": _SECONDS, "num_retries": 0},
    }
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    expect(text and whole.usage.completion_tokens > 0, "an answer with its usage")
    chunks = list(litellm.completion(**asked, stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    expect(streamed == text, f"streamed {streamed!r}, whole {text!r}")
    later = asyncio.run(litellm.acompletion(**asked))
    expect(later.choices[0].message.content == text, "the same, asynchronously")
    raw = {key: value for key, value in asked.items() if key not in ("messages", "model")}
    completed = litellm.text_completion(
        model=f"text-completion-openai/{server.model}", prompt="The capital of Italy is", **raw
    )
    expect(completed.choices[0].text, "a completion of a raw text")
    try:
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 20_000}]})
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("no ContextWindowExceededError for a prompt that is too long")
    return ["whole", "stream", "async", "text completion", "context window error"]


def check_llm(server: Server) -> list[str]:
    """The command line program, with a model of extra-openai-models.yaml: whole, streamed, a conversation."""
    with tempfile.TemporaryDirectory() as folder:
        model = {
            "model_id": "strata",
            "model_name": server.model,
            "api_base": server.base,
            "api_key_name": "strata",
        }
        # JSON is YAML
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([model]))
        (Path(folder) / "keys.json").write_text(json.dumps({"strata": server.key}))

        def ask(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", "prompt", "-m", "strata", "-o", "temperature", "0"]
            environment = {**os.environ, "LLM_USER_PATH": folder, "LLM_LOAD_PLUGINS": ""}  # only its own
            command += ["-o", "max_tokens", "16", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS)
            expect(done.returncode == 0, f"llm: {done.stderr[-500:]}")
            return done.stdout.strip()

        whole = ask("--no-stream", _QUESTION[0]["content"])
        expect(whole and ask(_QUESTION[0]["content"]) == whole, f"the same streamed as {whole!r}")
        expect(ask("-c", "And of Italy?"), "a second turn")
    return ["whole", "stream", "second turn"]


CLIENTS: dict[str, Callable[[Server], list[str]]] = {
    "openai": check_openai,
    "litellm": check_litellm,
    "llm": check_llm,
}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--url", required=True, help="e.g. http://127.0.0.1:8080")
    parser.add_argument("--key", default="", help="its API key")
    parser.add_argument("--model", default="strata-demo", help="the model's name [strata-demo]")
    parser.add_argument("--only", choices=[*CLIENTS], help="one client")
    options = parser.parse_args()
    server = Server(options.url, options.key)
    server.model = options.model
    passed, failed = 0, 0
    for name in [options.only] if options.only else CLIENTS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed")
            continue
        try:
            print(f"{name} {version}: {', '.join(CLIENTS[name](server))}")
            passed += 1
        except Exception as error:
            print(f"{name} {version}: FAILED: {type(error).__name__}: {error}")
            failed += 1
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
