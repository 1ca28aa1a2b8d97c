"""Options whose value is empty: nearly always a shell variable that is not set, and then not what was meant.
`--api-key-file "$KEYS"` would serve without a key, `--host "$HOST"` listen on every address."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from strata.errors import UsageError

_OWN_WORDS = ("--system", "-p", "--prompt", "--stop")
"""An empty system prompt is none; what the others make of it they say themselves."""


def refuse_empty(words: Sequence[str]) -> None:
    """UsageError for an option with an empty value, `--x ""` or `--x=`."""
    for before, word in itertools.pairwise(["", *words]):
        joined = word.startswith("--") and word.endswith("=") and word.count("=") == 1
        option = word[:-1] if joined else before if word == "" and before.startswith("-") else ""
        if option and option not in _OWN_WORDS:
            raise UsageError(
                f"{option} is followed by an empty value",
                remedy="leave it out, or give one: is a variable of the shell not set?",
            )
