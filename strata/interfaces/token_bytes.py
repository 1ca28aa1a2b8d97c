"""The bytes one token stands for, so that text can be put together token by token.

`tokenizers` decodes whole sequences only. The decoders of language models, though, are a per-token mapping
followed by joining, and this reads that mapping from the `decoder` section of tokenizer.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from strata.errors import UnsupportedError

_OTHER = "take a tokenizer.json whose decoder is byte-level or of byte fallback, or a GGUF file"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


BYTE_LETTERS = _byte_letters()


class TokenBytes:
    """Maps a token's text to its bytes by the rules of one decoder.

    strip_first: how many spaces the start of a text loses (SentencePiece's dummy prefix).
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self.strip_first = 0
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._byte_level = False
        self._fused = False
        if decoder is None:
            raise UnsupportedError(
                "tokenizer.json has no decoder: tokens cannot be turned back into text", remedy=_OTHER
            )
        self._read(decoder)

    def _read(self, decoder: Mapping[str, Any]) -> None:
        steps: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "Sequence": self._read_sequence,
            "ByteLevel": self._read_byte_level,
            "ByteFallback": self._read_byte_fallback,
            "Replace": self._read_replace,
            "Metaspace": self._read_metaspace,
            "Fuse": self._read_fuse,
            "Strip": self._read_strip,
        }
        step = steps.get(str(decoder.get("type")))
        if step is None:
            raise UnsupportedError(
                f"tokenizer.json: decoder {decoder.get('type')!r} is not supported", remedy=_OTHER
            )
        step(decoder)

    def _read_sequence(self, decoder: Mapping[str, Any]) -> None:
        for part in decoder["decoders"]:
            self._read(part)

    def _read_byte_level(self, _: Mapping[str, Any]) -> None:
        self._byte_level = True

    def _read_byte_fallback(self, _: Mapping[str, Any]) -> None:
        self._byte_fallback = True

    def _read_fuse(self, _: Mapping[str, Any]) -> None:
        self._fused = True

    def _read_replace(self, decoder: Mapping[str, Any]) -> None:
        pattern = decoder["pattern"].get("String")
        if pattern is None or self._fused:
            raise UnsupportedError(
                "tokenizer.json: only plain per-token Replace decoders are supported", remedy=_OTHER
            )
        self._replacements.append((pattern, decoder["content"]))

    def _read_metaspace(self, decoder: Mapping[str, Any]) -> None:
        self._replacements.append((decoder.get("replacement", "\u2581"), " "))
        if decoder.get("prepend_scheme", "always") != "never":
            self.strip_first = 1

    def _read_strip(self, decoder: Mapping[str, Any]) -> None:
        if not self._fused or decoder["content"] != " " or decoder["stop"]:
            raise UnsupportedError(
                "tokenizer.json: only a Strip decoder for leading spaces is supported", remedy=_OTHER
            )
        self.strip_first = int(decoder["start"])

    def __call__(self, token: str) -> bytes:
        """The UTF-8 bytes of a token's text; possibly a part of a character only."""
        if self._byte_fallback:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte:
                return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_level:
            try:
                return bytes([BYTE_LETTERS[letter] for letter in token])
            except KeyError:  # an added token is written as it is
                pass
        return token.encode("utf-8", "replace")
