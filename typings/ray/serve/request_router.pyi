from typing import Any

from ray.serve._private.common import RequestMetadata

class ReplicaID:
    unique_id: str

class RequestRoutingContext:
    should_backoff: bool

class PendingRequest:
    args: list[Any]
    kwargs: dict[str, Any]
    metadata: RequestMetadata
    routing_context: RequestRoutingContext
    def __init__(self, *, args: list[Any], kwargs: dict[str, Any], metadata: RequestMetadata) -> None: ...

class ReplicaResult:
    async def get_async(self) -> Any: ...
    def cancel(self) -> None: ...

class RunningReplica:
    @property
    def replica_id(self) -> ReplicaID: ...
    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult: ...

class RequestRouter:
    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]: ...
    def initialize_state(self, **kwargs: Any) -> None: ...
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None: ...
    def update_replicas(self, replicas: list[RunningReplica]) -> None: ...
    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None: ...
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]: ...
