"""Ray Serve's request router with an eye for prefixes: a prompt goes where its beginning is cached.

Only so far as the load stays even: a replica that has more unfinished requests than the least busy one, by
more than `slack`, loses its preference.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from strata.interfaces.ray_serve.prefix import PrefixIndex


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # ray is an extra, and untyped
    """Expects the keys of `prefix_keys` as a request's first argument. Ray makes it; one loop owns it."""

    def initialize_state(self, slack: int = 4, **_: Any) -> None:
        """Called by Ray with the configured arguments."""
        self.slack = slack
        self.index = PrefixIndex()
        self.unfinished: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first; in each rank Ray takes the one with the shortest queue."""
        matches = self.index.matches(_keys(pending_request))
        load = {each.replica_id: self._load(each) for each in candidate_replicas}
        least = min(load.values(), default=0)
        ranks: dict[int, list[RunningReplica]] = {}
        for each in candidate_replicas:
            preferred = load[each.replica_id] <= least + self.slack
            ranks.setdefault(matches.get(each.replica_id, 0) if preferred else -1, []).append(each)
        return [ranks[blocks] for blocks in sorted(ranks, reverse=True)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray: that replica computes the prompt now."""
        self.index.record(_keys(pending_request), replica_id)
        self.unfinished[replica_id] = self.unfinished.get(replica_id, 0) + 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str, *_: Any) -> None:
        """Called by Ray."""
        super().on_request_completed(replica_id, internal_request_id, *_)
        self.unfinished[replica_id] = max(0, self.unfinished.get(replica_id, 0) - 1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray: its cache is gone."""
        super().on_replica_actor_died(replica_id)
        self.index.forget(replica_id)
        self.unfinished.pop(replica_id, None)

    def _load(self, replica: RunningReplica) -> int:
        """Its queue as Ray knows it, of all front ends; where Ray knows nothing, what was sent from here."""
        known = self.replica_queue_len_cache.get(replica.replica_id)
        return int(known) if known is not None else self.unfinished.get(replica.replica_id, 0)


def _keys(pending: PendingRequest | None) -> tuple[int, ...]:
    return tuple(pending.args[0]) if pending is not None and pending.args else ()
