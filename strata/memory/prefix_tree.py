"""Finds KV pages by what they hold: a tree whose nodes are pages and whose paths are texts.

The keys and values of a token depend on all tokens before it, so a page may serve another request only if
everything up to and including it is the same. A child of a node is a page that was computed right after it.
Tokens themselves are compared, not hashes of them: a crafted collision would show one user's text to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """One page and its tokens; fewer than a page holds: only so many were computed, it has no children.

    children: by their first token. page None: the root, which stands before all texts.
    """

    page: int | None
    tokens: Tokens
    parent: Node | None
    children: dict[int, list[Node]] = field(default_factory=dict)

    def below(self) -> Iterator[Node]:
        """All nodes under this one."""
        waiting = [self]
        while waiting:
            for siblings in waiting.pop().children.values():
                yield from siblings
                waiting += siblings


@dataclass(frozen=True)
class Match:
    """Pages that hold the beginning of a text, whole; then perhaps one of which `common` tokens agree."""

    pages: tuple[int, ...] = ()
    partial: int | None = None
    common: int = 0
    node: Node | None = None
    """The node of the last whole page, the root if there is none."""


class PrefixTree:
    """The pages that can be found. Who holds a page, and when it is forgotten, is the owner's business."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.root = Node(None, (), None)
        self._nodes: dict[int, Node] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest beginning of `tokens` that pages hold."""
        pages: list[int] = []
        node = self.root
        while True:
            start = len(pages) * self.page_tokens
            best, common = _longest(node, tuple(tokens[start : start + self.page_tokens]))
            if best is None or best.page is None:
                return Match(tuple(pages), node=node)
            if common < self.page_tokens:
                return Match(tuple(pages), best.page, common, node)
            pages.append(best.page)
            node = best

    def add(self, parent: Node, page: int, tokens: Tokens) -> Node:
        """The node that holds `tokens` after `parent`: a new one for `page`, or the one there is already."""
        best, common = _longest(parent, tokens)
        if best is not None and common == len(tokens):
            return best
        node = Node(page, tokens, parent)
        parent.children.setdefault(tokens[0], []).append(node)
        self._nodes[page] = node
        return node

    def remove(self, page: int) -> list[int]:
        """Forget a page and all below it, which cannot be reached without it; the pages forgotten."""
        node = self._nodes[page]
        assert node.parent is not None
        siblings = node.parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.tokens[0]]
        gone = [node, *node.below()]
        for each in gone:
            each.parent = None
            assert each.page is not None
            del self._nodes[each.page]
        return [each.page for each in gone if each.page is not None]

    def attached(self, node: Node) -> bool:
        """Whether a child of `node` could be found."""
        return node is self.root or node.parent is not None


def _longest(parent: Node, tokens: Tokens) -> tuple[Node | None, int]:
    """The child with which `tokens` have most in common, and how many tokens that are."""
    best, most = None, 0
    for child in parent.children.get(tokens[0], ()) if tokens else ():
        common = _common(child.tokens, tokens)
        if common > most:
            best, most = child, common
    return best, most


def _common(a: Tokens, b: Tokens) -> int:
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
