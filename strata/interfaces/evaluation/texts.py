"""The text that models are measured on: a file, cut into windows of tokens that each begin without a past."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from strata.engine.perplexity import split_windows
from strata.errors import UsageError
from strata.interfaces.calibration import TextFile
from strata.interfaces.tokenizer import Tokenizer

PROSE = Path(__file__).parent / "prose.txt"
"""What is taken when no text is named: 35 KB; prose.md says what it is."""
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Cut:
    """How a text becomes windows. window: tokens of each. tokens: of the text, at most.

    second_half: llama-perplexity's protocol: whole windows only, and what is scored are the tokens behind the
    middle of each.
    """

    window: int
    tokens: int | None = None
    second_half: bool = False


@dataclass(frozen=True)
class Text:
    """name: of the file. xxh3: of its bytes, hexadecimal. windows: token ids."""

    name: str
    xxh3: str
    windows: tuple[tuple[int, ...], ...]
    cut: Cut

    @property
    def tokens(self) -> int:
        """In all windows."""
        return sum(map(len, self.windows))

    @property
    def predictions(self) -> int:
        """How many of them are foreseen: see `perplexity.predictions`."""
        halves = self.cut.second_half
        return sum(len(window) - 1 - (len(window) // 2 if halves else 0) for window in self.windows)


def read_text(path: Path, tokenizer: Tokenizer, cut: Cut) -> Text:
    """Control tokens in the text are plain characters. Where the tokenizer wants BOS, it takes the place of
    every window's first token, as in llama-perplexity.

    UsageError where nothing is left to foresee, the file is not UTF-8, or larger than 64 MiB.
    """
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path}: {path.stat().st_size} bytes, at most {_MOST_BYTES}", remedy="cut it")
    ids = tokenizer.encode(TextFile(str(path), data).text)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = [*bos, *ids][: cut.tokens]
    cuts = split_windows(ids, cut.window)
    windows = tuple((*bos, *window[len(bos) :]) for window in cuts)
    if cut.second_half:
        windows = tuple(window for window in windows if len(window) == cut.window)
    text = Text(path.name, xxhash.xxh3_64_hexdigest(data), windows, cut)
    if text.predictions < 2:
        least = cut.window if cut.second_half else 3
        raise UsageError(f"{path} has {len(ids)} tokens, needed are {least}", remedy="a longer --text")
    return text
