from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle as DeploymentHandle

class Application: ...

class ReplicaId:
    unique_id: str

class ReplicaContext:
    replica_id: ReplicaId

class Deployment:
    def bind(self, *args: Any, **kwargs: Any) -> Application: ...
    def options(self, **options: Any) -> Deployment: ...

def deployment(target: type[Any], /) -> Deployment: ...
def get_replica_context() -> ReplicaContext: ...

__all__ = ["Application", "Callable", "Deployment", "DeploymentHandle", "deployment", "get_replica_context"]
