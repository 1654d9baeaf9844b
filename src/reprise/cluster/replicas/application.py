"""`serve run reprise.cluster.replicas:build model=MODEL replicas=2`: the application, and its arguments."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.serve import Application, deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from typer import Exit

from reprise.cli.configuration import FILE_NAME, FILE_VARIABLE, choose, read_file
from reprise.cluster.replicas.ray_parts import EngineReplica, Front, LookupRouter, ScalingPolicy
from reprise.core.settings import OPTIONS, Settings

_ENDS_S = 10.0
"""Beyond `--grace`: for Ray to notice that the requests have ended, and for the process to end."""
_LOOKS_EVERY_S = 0.5
"""While a replica stops, whether its requests have ended."""
_FIELDS = {option.name: field for field, option in OPTIONS.items()}


class DeployArguments(BaseModel):
    """What `build` takes; beside these, each option of `reprise serve` by its name (`max_tokens=512`).

    Options that are not given come from the environment (`REPRISE_MAX_TOKENS`) and the configuration file of the
    machine on which the application is built, as with `reprise serve`.
    """

    model_config = ConfigDict(extra="allow")

    replicas: int = Field(default=1, ge=0)
    """How many; with `max_replicas`, the least."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Add and remove replicas up to this number; None: there are always as many."""
    target_requests: float = Field(default=8, gt=0)
    """Requests of a replica, running and waiting, beyond which another one is added."""
    target_memory: float = Field(default=0.8, gt=0, le=1)
    """The share of a replica's memory budget that running requests hold, beyond which another one is added."""
    upscale_delay_s: float = Field(default=30, ge=0)
    """For so long more replicas have to be wanted."""
    downscale_delay_s: float = Field(default=600, ge=0)
    """For so long fewer replicas have to be wanted. What the memory of one that is removed holds is lost to the others,
    unless they share a `disk-cache`."""
    max_requests: int = Field(default=256, ge=1)
    """Of a replica at a time; more wait in front."""
    num_cpus: float = Field(default=1, ge=0)
    """Of each replica, for Ray to find a place for it."""
    num_gpus: float = Field(default=0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources that a replica's machine needs to have."""
    fronts: int = Field(default=1, ge=1)
    """Processes that take HTTP requests and choose the replica."""
    lookup_timeout_s: float = Field(default=2.0, gt=0)
    """For replicas to say what a request would find there; then one is taken without that."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}")
        return self

    def settings(self, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings of each replica. Raises ValueError with a sentence."""
        given: dict[str, Any] = {}
        for name, value in (self.model_extra or {}).items():
            option = name.replace("_", "-")
            if option not in _FIELDS:
                raise ValueError(f"Unknown argument {name!r}: `reprise serve` has no such option.")
            given[_FIELDS[option]] = value
        named = environment.get(FILE_VARIABLE) or None
        default = platformdirs.user_config_path("reprise", appauthor=False) / FILE_NAME
        file = read_file((default if named is None else Path(named)).expanduser(), is_required=named is not None)
        try:
            settings = choose(OPTIONS, given, environment, file).settings()
        except Exit:
            raise ValueError("No server can be started like this; see above.") from None
        if settings.is_tensor_parallel:
            raise ValueError("--tensor-parallel starts its own processes, and cannot run in a replica.")
        return settings


def build(arguments: DeployArguments) -> Application:
    """The application. Raises ValueError with a sentence."""
    settings = arguments.settings()
    stopping = {
        "graceful_shutdown_timeout_s": settings.grace_s + _ENDS_S,
        "graceful_shutdown_wait_loop_s": _LOOKS_EVERY_S,
    }
    if arguments.max_replicas is None:
        number: dict[str, Any] = {"num_replicas": arguments.replicas}
    else:
        policy = AutoscalingPolicy(
            policy_function=ScalingPolicy, policy_kwargs={"target_memory": arguments.target_memory}
        )
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=arguments.replicas,
                max_replicas=arguments.max_replicas,
                target_ongoing_requests=arguments.target_requests,
                upscale_delay_s=arguments.upscale_delay_s,
                downscale_delay_s=arguments.downscale_delay_s,
                policy=policy,
            )
        }
    engine = deployment(EngineReplica).options(
        name="Engine",
        max_ongoing_requests=arguments.max_requests,
        ray_actor_options={
            "num_cpus": arguments.num_cpus,
            "num_gpus": arguments.num_gpus,
            "resources": arguments.resources,
        },
        request_router_config=RequestRouterConfig(
            request_router_class=LookupRouter, request_router_kwargs={"timeout_s": arguments.lookup_timeout_s}
        ),
        **number,
        **stopping,
    )
    front = deployment(Front).options(
        name="Front",
        num_replicas=arguments.fronts,
        max_ongoing_requests=settings.max_connections,
        # It finds a place also where the replicas have taken all.
        ray_actor_options={"num_cpus": 0},
        **stopping,
    )
    return front.bind(settings, engine.bind(settings))
