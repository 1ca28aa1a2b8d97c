"""Made-up memory nodes behind the calls of NumaCalls: pages that can be put, asked for and moved."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from strata.hardware.numa_calls import NumaCalls, Policy


class FakeNuma(NumaCalls):
    """where: node of the page at an address. stuck: pages that do not move. refuse: errno of all calls."""

    def __init__(self, where: dict[int, int] | None = None, *, refuse: int = 0) -> None:
        self.where = where if where is not None else {}
        self.stuck: set[int] = set()
        self.refuse = refuse
        self.policies: list[tuple[tuple[int, ...], Policy]] = []
        self.bound: list[tuple[int, int, tuple[int, ...], Policy]] = []
        self.calls = 0

    def _called(self) -> None:
        self.calls += 1
        if self.refuse:
            raise OSError(self.refuse, "refused")

    def bind(self, address: int, nbytes: int, nodes: Sequence[int], policy: Policy) -> None:
        self._called()
        self.bound.append((address, nbytes, tuple(nodes), policy))

    def set_policy(self, nodes: Sequence[int], policy: Policy) -> None:
        self._called()
        self.policies.append((tuple(nodes), policy))

    def policy(self) -> tuple[Policy, tuple[int, ...]]:
        return Policy.DEFAULT, ()

    def nodes_of(self, addresses: Sequence[int]) -> list[int]:
        self._called()
        return [self.where.get(address, -errno.ENOENT) for address in addresses]

    def move(self, addresses: Sequence[int], nodes: Sequence[int]) -> list[int]:
        self._called()
        for address, node in zip(addresses, nodes, strict=True):
            if address not in self.stuck:
                self.where[address] = node
        return [-errno.EBUSY if address in self.stuck else self.where[address] for address in addresses]
