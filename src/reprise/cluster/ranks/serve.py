"""`reprise serve --tensor-parallel`: the settings it refuses, and the ranks other than 0."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reprise.api.http.ending import RESTARTABLE
from reprise.cli.refuse import refusals, refuse
from reprise.cluster.ranks.launcher import JACCL, backend_of, num_ranks_of
from reprise.core.errors import RepriseError
from reprise.core.settings import AUTO, OPTIONS, Settings
from reprise.disk.folders.bucket import is_url

if TYPE_CHECKING:
    from reprise.cluster.ranks.group import LeadingRank

_LAUNCH = "mlx.launch -n 2 --backend ring $(which reprise) serve MODEL --tensor-parallel"


_REFUSED = (
    *("other_models", "models_dir", "has_hub_cache"),
    *("adapters", "adapter_path"),
    *("preloads", "is_pinned", "keep_alive_s"),
    "draft_model",
)
"""Settings for several models, adapters, and a draft model, whose passes only rank 0 would run."""


def check_rank(settings: Settings, environment: Mapping[str, str]) -> None:
    """Refuse settings that several ranks do not support, and a process that was not started by a launcher."""
    backend = backend_of(environment)
    if backend is None:
        refuse(f"--tensor-parallel needs the ranks of a launcher, with the ring backend. Start it with: {_LAUNCH}")
    plain = Settings(model=settings.model)
    given = [f"--{OPTIONS[name].name}" for name in _REFUSED if getattr(settings, name) != getattr(plain, name)]
    given += ["[models]"] if len(settings.models) > 0 else []
    given += [] if settings.mtp in (AUTO, "off") else ["--mtp"]
    if settings.disk_directory is not None and is_url(settings.disk_directory):
        refuse("--tensor-parallel keeps prefixes in directories only: give one for --disk-cache, not an object store.")
    if given:
        refuse(f"{' and '.join(given)} cannot be used with --tensor-parallel yet. Start it without.")
    if backend == JACCL:
        sys.stderr.write("reprise: the jaccl backend was not measured: the tests run with ring.\n")


def least_nbytes_of_rank(nbytes: int, environment: Mapping[str, str]) -> int:
    """The least that this process holds of weights of `nbytes`."""
    num = num_ranks_of(environment)
    return 0 if num is None else nbytes // num


def leading_rank(settings: Settings) -> "LeadingRank":
    """The group that this process leads."""
    from reprise.cluster.ranks.group import LeadingRank  # noqa: PLC0415 (imports MLX)

    return LeadingRank(settings)


def follow_rank_0(settings: Settings) -> None:
    """Follow rank 0 until it stops this rank. Exits the process if rank 0 is gone."""
    with refusals():
        from reprise.cli.log import configure_logging  # noqa: PLC0415 (imports rich)
        from reprise.cluster.ranks.group import follow  # noqa: PLC0415 (imports MLX)

        configure_logging(settings)
        try:
            follow(settings, on_ready=_leave_signals_to_rank_0, on_end=lambda: _end("rank 0 has ended unexpectedly"))
        except RepriseError:
            raise
        except Exception as error:
            _end(f"it failed: {type(error).__name__}: {error}")


def _leave_signals_to_rank_0() -> None:
    # Ctrl-C and the launcher's signal reach all ranks: rank 0 lets answers finish first, for which it needs the others.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


def _end(why: str) -> None:
    sys.stderr.write(f"reprise: {why}, so this rank exits.\n")
    sys.stderr.flush()
    os._exit(RESTARTABLE)
