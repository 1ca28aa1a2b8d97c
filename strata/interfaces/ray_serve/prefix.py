"""Which replica has the beginning of a prompt in its KV cache: asked of what was routed where."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import xxhash

_BLOCK = 256  # characters, some 60 tokens: two KV pages
_MOST_BLOCKS = 256  # of a prompt; what is longer is routed by its beginning
_MOST_KEYS = 200_000  # some 20 MB


def prefix_keys(body: bytes) -> tuple[int, ...]:
    """One key for each beginning of a request's prompt, a block longer each; () where there is no prompt.

    Prompts that begin alike have the first keys in common. What is no JSON object has none: the replica will
    say what is wrong with it.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(asked, dict):
        return ()
    # Tools stand before the conversation in most templates.
    parts = [asked.get("tools"), *_as_list(asked.get("messages")), asked.get("prompt")]
    text = "\0".join(json.dumps(part, sort_keys=True) for part in parts if part)
    ends = range(_BLOCK, min(len(text), _BLOCK * _MOST_BLOCKS) + 1, _BLOCK)
    return _chained(text, ends) if text else ()


def _chained(text: str, ends: Iterable[int]) -> tuple[int, ...]:
    hasher = xxhash.xxh3_64()
    keys = []
    for end in ends:
        hasher.update(text[end - _BLOCK : end].encode("utf-8", "surrogatepass"))
        keys.append(hasher.intdigest())
    return tuple(keys)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class PrefixIndex:
    """Where prompts were sent, by the keys of their beginnings; what was not asked for longest is forgotten.

    Belongs to one thread.
    """

    def __init__(self, most: int = _MOST_KEYS) -> None:
        self._most = most
        self._where: OrderedDict[int, dict[Hashable, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._where)

    def record(self, keys: Sequence[int], replica: Hashable) -> None:
        """A prompt goes to a replica, which will have all its beginnings."""
        for key in keys:
            self._where.setdefault(key, {})[replica] = None
            self._where.move_to_end(key)
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def matches(self, keys: Sequence[int]) -> dict[Hashable, int]:
        """For each replica that has any: how many blocks of the prompt it has."""
        found: dict[Hashable, int] = {}
        for count, key in enumerate(keys, 1):
            holders = self._where.get(key)
            if holders is None:
                break
            found.update(dict.fromkeys(holders, count))
        return found

    def forget(self, replica: Hashable) -> None:
        """A replica is gone, and its cache with it."""
        for key in [key for key, holders in self._where.items() if replica in holders]:
            del self._where[key][replica]
            if not self._where[key]:
                del self._where[key]
