"""Replicas of a server on Ray Serve: ``serve run reprise.cluster.replicas:build model=MODEL replicas=2``.

Needs the extra `ray`. `app` is `build` with what the environment and the configuration file say.
"""

from typing import TYPE_CHECKING, Any

from reprise.core.installation import mend_line

if TYPE_CHECKING:
    from reprise.cluster.replicas.application import DeployArguments, build

__all__ = ["DeployArguments", "build"]


def __getattr__(name: str) -> Any:
    """What is asked for, so that the parts that need no Ray can be imported without it."""
    if name not in (*__all__, "app"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from reprise.cluster.replicas import application  # noqa: PLC0415 (imports Ray)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ImportError(f"{__name__} needs Ray Serve. Install it with: {mend_line('ray')}") from error
    return application.build(application.DeployArguments()) if name == "app" else getattr(application, name)
