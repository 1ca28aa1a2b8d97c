"""What /openapi.json promises, tried out by schemathesis: requests that fit the schema, and some that do not.

    strata serve demo --context 48 --port 8080 &
    python scripts/schema_check.py --url http://127.0.0.1:8080 --examples 2000

For every operation so many requests are made up: a third with any valid values, a third of them with few
options, for what many say at once is mostly refused, and a third that is wrong. No answer may be 5xx, every
status must be a documented one, and every body must have its documented shape. The same seed makes the same
requests. Exit status 0 only then.
A small context keeps answers short: requests may ask for millions of tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_NEEDED = {"messages", "prompt", "content", "tokens"}  # what the bodies are about
_SECONDS = 120.0  # against an answer that never comes


def check_operation(operation: Any, key: str, examples: int, seed: int) -> Counter[int]:
    """How often each status was answered. Raises what the first check that failed raises."""
    statuses: Counter[int] = Counter()
    headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(case: Any) -> None:
        response = case.call(headers=headers, timeout=_SECONDS)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=_CHECKS)

    valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    few = strategies.tuples(valid, strategies.lists(strategies.integers(0, 99), max_size=3)).map(
        lambda found: _with_few(*found)
    )
    for strategy in (valid, few, wrong):
        try:
            one_mode(strategy, ask, examples // 3, seed)
        except hypothesis.errors.Unsatisfiable:
            continue  # nothing can be wrong about a GET without parameters
    return statuses


def _with_few(case: Any, kept: list[int]) -> Any:
    """The case with what its body needs, and those optional keys that `kept` points to."""
    if isinstance(case.body, dict):
        optional = sorted(set(case.body) - _NEEDED)
        names = _NEEDED | {optional[index % len(optional)] for index in kept if optional}
        case.body = {name: value for name, value in case.body.items() if name in names}
    return case


def one_mode(strategy: Any, ask: Any, examples: int, seed: int) -> None:
    """So many requests of one kind."""
    settings: Any = hypothesis.settings(
        max_examples=max(examples, 1),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate,),
    )
    seeded: Any = hypothesis.seed(seed)
    made_up: Any = hypothesis.given(strategy)
    seeded(settings(made_up(ask)))()


def main() -> int:
    options = parse()
    schema = schemathesis.openapi.from_url(f"{options.url}/openapi.json", headers=_headers(options.key))
    failed, total = 0, 0
    for found in schema.get_all_operations():
        operation = found.ok()
        begin = time.perf_counter()
        name = f"{operation.method.upper()} {operation.path}"
        try:
            statuses = check_operation(operation, options.key, options.examples, options.seed)
        except (Exception, FailureGroup) as error:
            failed += 1
            print(f"{name}: FAILED: {error}")
            for note in getattr(error, "exceptions", ()):
                print(f"  {note}")
            continue
        total += sum(statuses.values())
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        print(f"{name}: {counts}  ({time.perf_counter() - begin:.1f} s)")
    print(f"{total} requests, {failed} operations failed")
    return 1 if failed or not total else 0


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="")
    parser.add_argument("--examples", type=int, default=200, help="requests for each operation [200]")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
