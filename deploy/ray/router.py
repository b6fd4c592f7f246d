"""Ray's way to choose a replica for a request, by affinity."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deploy.ray.affinity import chosen


class AffinityRouter(RequestRouter):
    """Send what shares a prefix or a session to the same replica, while its queue is not much longer than others'.

    The key comes as Ray's session id, which the middleware in the proxy sets. Ray takes the least loaded replica of a
    rank, and asks it before sending: one that is full passes to the next rank.
    """

    def initialize_state(self, max_excess: int = 8, **_: Any) -> None:
        self._max_excess = max_excess

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or Ray asks full replicas again without a pause
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        key = pending_request.metadata.session_id or None
        ranks: Sequence[Sequence[str]] = chosen(key, loads, self._max_excess)
        return [[by_name[name] for name in rank] for rank in ranks]
