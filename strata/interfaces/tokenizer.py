"""Text to token ids and back, from the tokenizer files of a store or a checkpoint directory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as _Encoder

from strata.errors import FileFormatError, IncompleteError, RequestError
from strata.interfaces.control_tokens import ControlTokens, Piece, is_control
from strata.interfaces.token_bytes import TokenBytes

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Tokens that end a turn whatever the configuration says (the list is llama.cpp's, llama-vocab.cpp).
_END_OF_TURN = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# Where these exist, <|end|> only closes a channel (gpt-oss, Solar).
_END_IS_NOT_THE_END = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    vocab_size: ids are below this (the model's embedding may have more rows). bos_id, eos_id: None where the
    model has none. stop_ids: any of these ends an answer. add_bos: raw text begins with BOS.
    special_tokens: `bos_token`, ... as chat templates see them. config: tokenizer_config.json.
    chat_templates: name -> source; the usual one is called "default".
    """

    def __init__(self, files: Mapping[str, bytes], *, where: str) -> None:
        """From file contents (names as in FILES; only tokenizer.json is required). Raises FileFormatError."""
        if "tokenizer.json" not in files:
            raise IncompleteError(
                f"{where}: tokenizer.json is missing", remedy="download it, or convert from a GGUF file"
            )
        self._where = where
        self.config = self._json(files, "tokenizer_config.json")
        self._encoder = self._load_encoder(files["tokenizer.json"])
        self._lock = threading.Lock()
        self._added = self._encoder.get_added_tokens_decoder()
        self.special_tokens = self._named_tokens(self._json(files, "special_tokens_map.json"))
        self._find_controls()
        self._find_bos()
        self.eos_id = self._id(self.special_tokens.get("eos_token"))
        self.stop_ids = self._stop_ids(files)
        self.vocab_size = max(self._encoder.get_vocab_size(), 1 + max(self._added, default=-1))
        self.chat_templates = self._chat_templates(files)
        self._read_decoder()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """From a store or a checkpoint directory. Raises IncompleteError where tokenizer.json is missing."""
        files = {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}
        return cls(files, where=str(directory))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text, without BOS. special False: control tokens in the text are just characters."""
        text = well_formed(text)
        ids = self._encode(text, special)
        if not special and self._forbidden.intersection(ids):
            ids = [i for half in self._controls.halves(text) for i in self._encode(half, special)]
        return ids

    def encode_completion(self, text: str) -> list[int]:
        """Ids of a raw prompt: control tokens count, BOS by the tokenizer's own rule."""
        ids = self.encode(text, special=True)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def encode_chat(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a rendered chat: exactly one BOS where the template or the tokenizer wants one."""
        ids: list[int] = []
        for piece in pieces:
            encode = self._continue if ids else self.encode
            ids += encode(piece.text, special=not piece.plain)
        if self.bos_id is None:
            return ids
        count = next((n for n, i in enumerate(ids) if i != self.bos_id), len(ids))
        return [self.bos_id] * bool(count or self.add_bos) + ids[count:]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Equal to what Detokenizer streams.

        continuation: the text goes on after a prompt, so that a leading space is kept.
        """
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        text = data.decode("utf-8", "replace")
        return text if continuation else self.strip_start(text)

    def strip_start(self, text: str) -> str:
        """Without the space that SentencePiece puts before the first word."""
        count = min(self._bytes.strip_first, len(text) - len(text.lstrip(" ")))
        return text[count:]

    def spelling(self) -> dict[int, str]:
        """Every id with the text that the vocabulary has for it."""
        return {index: text for text, index in self._encoder.get_vocab(with_added_tokens=True).items()}

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token; empty for ids past the vocabulary (padded embeddings)."""
        known = self._known_bytes.get(index)
        if known is None:
            token = self._encoder.id_to_token(index) if index >= 0 else None
            known = self._known_bytes[index] = b"" if token is None else self._bytes(token)
        return known

    @property
    def controls(self) -> ControlTokens:
        """Finds and marks this tokenizer's control tokens in conversations."""
        return self._controls

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        return self._id(token)

    def _json(self, files: Mapping[str, bytes], name: str) -> dict[str, Any]:
        try:
            value = json.loads(files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{self._where}: {name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise FileFormatError(f"{self._where}: {name} is a {type(value).__name__}, not an object")
        return value

    def _load_encoder(self, content: bytes) -> _Encoder:
        try:
            return _Encoder.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for every fault
            raise FileFormatError(f"{self._where}: tokenizer.json is broken: {error}") from error

    def _named_tokens(self, legacy: Mapping[str, Any]) -> dict[str, str]:
        """bos_token and the like; a value is a string or an object with `content`."""
        tokens = {}
        for name in _NAMED:
            value = self.config.get(name, legacy.get(name))
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[name] = value
        return tokens

    def _find_controls(self) -> None:
        """Tell the encoder which added tokens are control, so that it can leave them alone on request.

        Its switch `encode_special_tokens` covers special tokens only; registering the others as special again
        changes neither ids nor matching.
        """
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        controls = {i: t for i, t in self._added.items() if is_control(t.content, t.special)}
        soft = [_as_special(t) for i, t in controls.items() if i not in self.special_ids]
        self._encoder.add_special_tokens(soft)
        self.control_ids = frozenset(controls)
        unknown = self._id(self.special_tokens.get("unk_token"))
        self._forbidden = self.control_ids - {unknown}
        self._controls = ControlTokens(token.content for token in controls.values())

    def _find_bos(self) -> None:
        """The configuration's word on BOS, else what the post-processor does to an empty text."""
        automatic = self._encoder.encode("", add_special_tokens=True).ids[:1]
        self.bos_id = self._id(self.special_tokens.get("bos_token"))
        stated = self.config.get("add_bos_token")
        self.add_bos = stated if isinstance(stated, bool) else bool(automatic) and automatic[0] == self.bos_id

    def _stop_ids(self, files: Mapping[str, bytes]) -> frozenset[int]:
        """generation_config's (else config's) ids, tokenizer_config's EOS, and well-known ends of a turn."""
        stops = {self.eos_id} if self.eos_id is not None else set()
        for name in ("generation_config.json", "config.json"):
            value = self._json(files, name).get("eos_token_id")
            if value is not None:
                stops.update(_id_list(value, f"{self._where}: {name}: eos_token_id"))
                break
        added = {token.content: i for i, token in self._added.items()}
        names = _END_OF_TURN & added.keys()
        if any(all(name in added for name in pair) for pair in _END_IS_NOT_THE_END):
            names -= {"<|end|>"}
        return frozenset(stops | {added[name] for name in names})

    def _chat_templates(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """chat_template.jinja, else the configuration's template or list of named templates."""
        if "chat_template.jinja" in files:
            return {"default": files["chat_template.jinja"].decode("utf-8", "replace")}
        value = self.config.get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        named = value if isinstance(value, list) else []
        if not all(isinstance(t, dict) and isinstance(t.get("template"), str) for t in named):
            raise FileFormatError(f"{self._where}: tokenizer_config.json: chat_template is no text or list")
        return {str(t.get("name", "default")): t["template"] for t in named}

    def _read_decoder(self) -> None:
        decoder = self._encoder.decoder
        self._bytes = TokenBytes(json.loads(decoder.__getstate__()) if decoder is not None else None)
        self._known_bytes: dict[int, bytes] = {}

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._encoder.token_to_id(well_formed(token))

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._lock:  # the switch belongs to the encoder, not to the call
            self._encoder.encode_special_tokens = not special
            try:
                return list(self._encoder.encode(text, add_special_tokens=False).ids)
            except (
                Exception
            ) as error:  # bare, too: a WordLevel model without its unknown token, a regex's limit
                raise RequestError(
                    f"{self._where}: tokenizer.json cannot encode the text: {error}",
                    remedy="try another text; if all fail, fetch the model's tokenizer again",
                ) from error

    def _continue(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text that follows another: no dummy prefix where only the very first word gets one."""
        if not self._prefix_is_first_only:
            return self.encode(text, special=special)
        text = well_formed(text)
        guard = "\ufdd2"  # a character that merges with nothing
        lead = self._encode(guard, special)
        ids = self._encode(guard + text, special)
        return ids[len(lead) :] if ids[: len(lead)] == lead else self.encode(text, special=special)

    @cached_property
    def _prefix_is_first_only(self) -> bool:
        before = self._encoder.pre_tokenizer
        return before is not None and b'"prepend_scheme":"first"' in before.__getstate__()


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates (JSON may carry them) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _id_list(value: Any, name: str) -> list[int]:
    """An id or a list of ids; anything else is an error that names the field."""
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise FileFormatError(f"{name} is {value!r}, not a token id or a list of them")
    return ids
