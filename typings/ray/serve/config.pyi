from typing import Any

class AutoscalingPolicy:
    def __init__(self, *, policy_function: str | type[Any] = ..., policy_kwargs: dict[str, Any] = ...) -> None: ...

class AutoscalingConfig:
    def __init__(
        self,
        *,
        min_replicas: int = ...,
        max_replicas: int = ...,
        target_ongoing_requests: float = ...,
        downscale_delay_s: float = ...,
        upscale_delay_s: float = ...,
        policy: AutoscalingPolicy = ...,
    ) -> None: ...
    def get_target_ongoing_requests(self) -> float: ...

class AutoscalingContext:
    current_num_replicas: int
    config: AutoscalingConfig
    @property
    def total_num_requests(self) -> float: ...
    @property
    def aggregated_metrics(self) -> dict[str, dict[Any, float]] | None: ...

class RequestRouterConfig:
    def __init__(
        self, *, request_router_class: str | type[Any] = ..., request_router_kwargs: dict[str, Any] = ...
    ) -> None: ...
