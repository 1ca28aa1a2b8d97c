"""A layer of the checkpoint proposes (MTP head), from the model's hidden states, with KV pages of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec
from strata.core import Batch, Request
from strata.core import Sequence as Part
from strata.engine.scheduler import Work
from strata.engine.speculative.draft import Draft
from strata.engine.speculative.proposer import Ask, Proposal
from strata.memory.kv_pages import KvPages
from strata.model.decoder import Decoder
from strata.model.further import FurtherLayer

F32 = NDArray[np.float32]

READ_AT = 32
"""Rows that wait for each other where nobody asks for a draft: the layer's weights are read once for all."""
FILLED = 64
"""Rows without a hidden state that are computed all the same, with zeros in its place, at most.

Those of a request's last step are never read, for it ends there; the next turn of a conversation begins with
them.
"""


class _Rows(NamedTuple):
    """To be computed. start: rows before them in the pages. tokens: those after the rows' positions. hidden:
    f32 `[rows, hidden]`. wanted: logits of the last one."""

    text: _Text
    start: int
    tokens: Sequence[int]
    hidden: F32
    wanted: bool


@dataclass
class _Text:
    """The layer's side of a request. own.tokens: `_keys` of its rows, of which own.computed are in the pages.
    limit: rows that the pages may hold.

    waiting: hidden states f32 `[n, hidden]` of the rows behind. skipped: positions that have no row, because
    nobody had their hidden states; rows behind them keep their positions.
    """

    request: Request
    own: Request
    limit: int
    waiting: list[F32] = field(default_factory=list)
    skipped: int = 0

    @property
    def next(self) -> int:
        """The position whose hidden state comes next."""
        return len(self.own.tokens) + self.skipped

    @property
    def unread(self) -> int:
        """Rows that wait."""
        return len(self.own.tokens) - self.own.computed

    def take(self, start: int, hidden: F32) -> None:
        """Hidden states of positions from `start` on."""
        missing = start - self.next
        if missing > FILLED:
            self.skipped += missing
        elif missing > 0:
            hidden = np.concatenate([np.zeros((missing, hidden.shape[1]), np.float32), hidden])
        else:
            hidden = hidden[-missing:]
        hidden = hidden[: max(0, self.limit - len(self.own.tokens))]
        if len(hidden):
            self.own.tokens += _keys(self.request.tokens, self.next, len(hidden))
            self.waiting.append(hidden)

    def read(self, kept: int) -> _Rows:
        """All rows that wait but the last `kept`; none kept: with logits of the last."""
        hidden, count = np.concatenate(self.waiting), self.unread - kept
        self.waiting = [hidden[count:].copy()] if kept else []
        start = self.own.computed
        first = start + self.skipped + 1
        return _Rows(self, start, self.request.tokens[first : first + count], hidden[:count], not kept)


def _keys(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """What tells rows apart: the token that each reads, for the first one the text's first token as well."""
    keys = list(tokens[start + 1 : start + 1 + count])
    return keys if start else [tokens[0] << 32 | keys[0], *keys[1:]]


class MtpProposer:
    """See `Proposer`. A request whose text does not fit the layer's context or pages gets no proposals.

    model: its passes leave hidden states from now on; the layer's backend has to be on the CPU. Row t of a
    text is computed of position t's hidden state and the token after it, and guesses the one after that; so
    when the model has sampled a token, the row of the position that it was sampled from is the next one. For
    each further guess the layer reads its own output. Rows of guesses are computed anew when they turn out
    right, from the model's hidden states.
    """

    name = "mtp"
    free, follows = False, True

    def __init__(self, model: Decoder, layer: FurtherLayer, kv: KvSpec, pages: int, context: int) -> None:
        model.keeps_hidden = True
        self.model = model
        self.layer = layer
        self.context = context
        self.pages = KvPages(pages, kv.page_tokens)
        self._cache = layer.backend.kv_cache(kv, pages)
        self._texts: dict[str, _Text] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """The asked requests go forward together, a token at a time."""
        drafts = {ask.request.request_id: self._draft(ask) for ask in asks if self._ready(ask)}
        going = list(drafts.values())
        if going:
            logits, hidden = self._read([self._text_of(draft) for draft in going], 0)
        while going:
            on = [row for row, draft in enumerate(going) if draft.guess(logits[row])]
            going = [going[row] for row in on]
            if going:
                states = zip(going, hidden[on, None], strict=True)
                logits, hidden = self._run([self._row(draft, state) for draft, state in states])
        found = (drafts.get(ask.request.request_id) for ask in asks)
        return [Proposal() if draft is None else draft.proposal for draft in found]

    def behind(self, request: Request) -> int | None:
        """Rows that wait before that of the latest sampled token's position; None: that is not the last."""
        text = self._texts.get(request.request_id)
        return text.unread - 1 if text and text.unread and text.next == len(request.tokens) - 1 else None

    def read(self, request: Request, count: int) -> None:
        """So many of those rows, which `follow` would read when READ_AT of them wait."""
        text = self._texts[request.request_id]
        self._read([text], text.unread - count)

    def glance(self, request: Request) -> int:
        """Nothing is seen without computing."""
        return 0

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """Take the step's hidden states; prompts, and what was decoded long without a draft, are read now.

        The last row is left for `propose`, which needs its logits.
        """
        first, ops, hidden = 0, self.model.backend, self.model.hidden
        for work, rows in zip(works, kept, strict=True):
            if work.request.finish_reason is None:
                self._take(work, ops.to_numpy(ops.some_rows(hidden, first, rows)).copy())
            first += work.count
        full = [text for text in self._texts.values() if text.unread > READ_AT]
        if full:
            self._read(full, 1)

    def forget(self, request_id: str) -> None:
        """Free its pages; what they hold of the text may serve the next turn of a conversation."""
        text = self._texts.pop(request_id, None)
        if text is None:
            return
        if text.skipped:  # its rows are no beginning of a text
            text.own.computed = text.own.shared
        self.pages.release(text.own)

    def check_integrity(self, running: set[str]) -> None:
        """AssertionError when pages are lost, or held by somebody who ended."""
        self.pages.check_integrity()
        if not set(self._texts) <= running:
            raise AssertionError(f"drafts of {set(self._texts) - running} hold pages, {running} run")

    def _ready(self, ask: Ask) -> bool:
        """Whether its row waits, so that a proposal can be made."""
        return self.behind(ask.request) is not None

    def _draft(self, ask: Ask) -> Draft:
        text = self._texts[ask.request.request_id]
        room = 1 + text.limit - len(text.own.tokens)  # the first guess is of a row that waits
        return Draft(ask, list(ask.request.tokens), room)

    def _text_of(self, draft: Draft) -> _Text:
        return self._texts[draft.ask.request.request_id]

    def _row(self, draft: Draft, hidden: F32) -> _Rows:
        """That of the latest guess, behind those of the ones before it: none of them stays."""
        text = self._text_of(draft)
        return _Rows(text, text.own.computed + draft.count - 1, draft.tokens[-1:], hidden, True)

    def _take(self, work: Work, hidden: F32) -> None:
        text = self._texts.get(work.request.request_id)
        if text is None and work.is_prefill:
            text = self._begin(work.request)
        if text is not None:
            text.take(work.start, hidden)

    def _begin(self, request: Request) -> _Text | None:
        """The layer's side of a request, with pages promised; None: it does not fit (now)."""
        asked = request.sampling.max_tokens
        limit = min(self.context, self.context if asked is None else len(request.prompt) + asked)
        keys = _keys(request.tokens, 0, len(request.tokens) - 1)
        own = Request(request.request_id, keys, request.sampling)
        if limit <= len(own.tokens) or not self.pages.fits(own, limit):
            return None
        copy = self.pages.reserve(own, limit)
        if copy is not None:
            self.layer.backend.copy_pages(self._cache, [copy])
        del own.tokens[own.computed :]  # rows that other requests computed stay
        text = self._texts[request.request_id] = _Text(request, own, limit)
        return text

    def _read(self, texts: Sequence[_Text], kept: int) -> tuple[F32, F32]:
        """Compute rows that wait, all but the last `kept` of each text. See `_run`."""
        found = self._run([text.read(kept) for text in texts])
        for text in texts:
            text.own.computed = len(text.own.tokens) - kept
            if not text.skipped:
                self.pages.publish(text.own)
        return found

    def _run(self, parts: Sequence[_Rows]) -> tuple[F32, F32]:
        """Logits `[n, vocab]` and normed states `[n, hidden]` of the rows that want them, in order."""
        tokens, positions, wanted, sequences = list[int](), list[int](), list[int](), list[Part]()
        for text, start, new, _, last in parts:
            stop = start + len(new)
            self.pages.extend(text.own, stop)
            table = np.array(text.own.pages, np.int32)
            sequences.append(Part(len(tokens), len(new), start, table))
            tokens += new
            positions += range(start + text.skipped, stop + text.skipped)
            wanted += [len(tokens) - 1] if last else []
        ids, places, rows = (np.array(each, np.int32) for each in (tokens, positions, wanted))
        hidden = np.concatenate([part.hidden for part in parts])
        batch = Batch(ids, places, tuple(sequences), rows)
        found, ops = self.layer.forward(batch, hidden, self._cache), self.layer.backend
        if found is None:
            return np.empty((0, 0), np.float32), np.empty((0, 0), np.float32)
        return ops.to_numpy(found.logits), ops.to_numpy(found.hidden)
