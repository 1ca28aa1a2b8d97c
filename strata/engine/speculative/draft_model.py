"""A small model proposes: it reads the same text with KV pages of its own, and writes on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec
from strata.core import Request
from strata.engine.executor import Executor
from strata.engine.scheduler import Work
from strata.engine.speculative.draft import Draft
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.vocabulary import IdMap
from strata.memory.kv_pages import KvPages, PageCopy
from strata.model.decoder import Decoder


@dataclass
class _Text:
    """The draft's side of a request. tokens: the model's ids; those beyond `certain` are the draft's guesses.

    own: the same in the draft's ids. limit: tokens that its pages may hold. copy: of a shared page, before
    the first work. ids: None where both have the same.
    """

    own: Request
    tokens: list[int]
    certain: int
    limit: int
    copy: PageCopy | None = None
    ids: IdMap | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Take in how the text really went on; what the draft computed of other guesses is void."""
        mine = self.tokens
        same = self.certain
        while same < min(len(mine), len(tokens)) and mine[same] == tokens[same]:
            same += 1
        self.cut(same)
        mine += tokens[same:]
        self.keep_up()
        self.own.computed = min(self.own.computed, same, len(mine) - 1)
        self.certain = len(mine)

    def keep_up(self) -> None:
        """`tokens` went on: so does the draft's own text."""
        new = self.tokens[len(self.own.tokens) :]
        self.own.tokens += new if self.ids is None else self.ids.ids(new)

    def cut(self, length: int) -> None:
        """It does not go on like that."""
        del self.tokens[length:], self.own.tokens[length:]

    def work(self, stop: int) -> Work:
        """Tokens up to `stop`; the logits of the last one where it is the last there is."""
        start, copy, self.copy = self.own.computed, self.copy, None
        return Work(self.own, start, stop - start, stop == len(self.own.tokens), self.own.pages, copy)


class DraftModel:
    """See `Proposer`. A request whose text does not fit the draft's context or pages gets no proposals.

    decoder: of a backend on the CPU; it works while the engine's own does not, on the same threads. Each
    token is what the request's sampler would choose from the draft's logits with the random number that it
    will use at that place: where both models agree on the likely tokens, they then choose the same one.
    ids: what the model's ids are to the draft; None: the same.
    """

    name = "draft"
    free, follows = False, False

    def __init__(
        self,
        decoder: Decoder,
        kv: KvSpec,
        pages: int,
        context: int,
        chunk: int,
        ids: IdMap | None = None,
    ) -> None:
        self.decoder = decoder
        self.context = context
        self.pages = KvPages(pages, kv.page_tokens)
        self._chunk = chunk
        self._ids = ids
        self._executor = Executor(decoder, decoder.backend.kv_cache(kv, pages))
        self._texts: dict[str, _Text] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """The asked requests go forward together, a token at a time."""
        drafts = {}
        for ask in asks:
            text = self._text(ask.request)
            if text is not None and self._catch_up(text, ask.request):
                drafts[ask.request.request_id] = Draft(ask, text.tokens, text.limit - len(text.tokens))
        going = list(drafts.values())
        while going:
            texts = [self._texts[draft.ask.request.request_id] for draft in going]
            logits = self._run([text.work(len(text.own.tokens)) for text in texts])
            known = logits if self._ids is None else [self._ids.logits(row) for row in logits]
            going = [draft for draft, row in zip(going, known, strict=True) if draft.guess(row)]
            for text in texts:
                text.keep_up()
        found = (drafts.get(ask.request.request_id) for ask in asks)
        return [Proposal() if draft is None else draft.proposal for draft in found]

    def behind(self, request: Request) -> int | None:
        """None where the text does not fit (now)."""
        text = self._text(request)
        if text is None:
            return None
        text.read(request.tokens)
        if len(text.own.tokens) >= text.limit:
            return None
        return len(text.own.tokens) - 1 - text.own.computed

    def read(self, request: Request, count: int) -> None:
        """In the engine's chunks."""
        text = self._text(request)
        if text is None:
            return
        text.read(request.tokens)
        stop = min(text.own.computed + count, len(text.own.tokens) - 1)
        while text.own.computed < stop:
            self._run([text.work(min(stop, text.own.computed + self._chunk))])
        self.pages.publish(text.own)

    def glance(self, request: Request) -> int:
        """Nothing is seen without computing."""
        return 0

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        """Nothing: prompts are read when they are asked for, and not where drafts do not pay."""

    def forget(self, request_id: str) -> None:
        """Free its pages; what they hold of the text may serve the next turn of a conversation."""
        text = self._texts.pop(request_id, None)
        if text is None:
            return
        text.cut(text.certain)
        text.own.computed = min(text.own.computed, text.certain - 1)
        self.pages.release(text.own)

    def check_integrity(self, running: set[str]) -> None:
        """AssertionError when pages are lost, or held by somebody who ended."""
        self.pages.check_integrity()
        if not set(self._texts) <= running:
            raise AssertionError(f"drafts of {set(self._texts) - running} hold pages, {running} run")

    def _text(self, request: Request) -> _Text | None:
        """The draft's side of a request, with pages promised; None: it does not fit (now)."""
        text = self._texts.get(request.request_id)
        if text is not None:
            return text
        asked = request.sampling.max_tokens
        longest = self.context if asked is None else len(request.prompt) + asked
        limit = min(self.context, longest)
        tokens = list(request.tokens)
        own_ids = list(tokens) if self._ids is None else self._ids.ids(tokens)
        own = Request(request.request_id, own_ids, request.sampling)
        if limit <= len(request.tokens) or not self.pages.fits(own, limit):
            return None
        copy = self.pages.reserve(own, limit)
        text = self._texts[request.request_id] = _Text(own, tokens, len(tokens), limit, copy, self._ids)
        return text

    def _catch_up(self, text: _Text, request: Request) -> bool:
        """Read the text; whether so little is left to compute that a proposal can be made now."""
        text.read(request.tokens)
        self.pages.publish(text.own)
        if len(text.own.tokens) >= text.limit:
            return False
        if len(text.own.tokens) - text.own.computed <= self._chunk:
            return True
        self._run([text.work(text.own.computed + self._chunk)])
        return False

    def _run(self, works: list[Work]) -> NDArray[np.float32]:
        """Logits of the works that complete their texts."""
        for work in works:
            self.pages.extend(work.request, work.start + work.count)
        rows = [found for found in self._executor.run(works) if isinstance(found, np.ndarray) and len(found)]
        return np.concatenate(rows) if rows else np.empty((0, 0), np.float32)
