"""`reprise serve MODEL`."""

import logging
import os
from dataclasses import replace

from reprise.api.http.activation import inherited_listener
from reprise.api.http.listening import FirstAnswers, listen, url_of
from reprise.api.http.web_access import WebAccess
from reprise.cli.configuration import DEFAULT, Configuration, with_options
from reprise.cli.entry import ended_by_interrupt
from reprise.cli.log import configure_logging
from reprise.cli.process_limits import check_process_limits
from reprise.cli.refuse import refusals
from reprise.cli.wings import ranks
from reprise.core.options import OFF
from reprise.core.settings import OPTIONS, Settings
from reprise.core.sizes import Bytes
from reprise.disk.default_place import default_directory, default_nbytes, why_unusable

log = logging.getLogger(__name__)


@with_options(OPTIONS)
def serve(configuration: Configuration) -> None:
    """Serve a model over HTTP, with the OpenAI, Anthropic and Ollama APIs.

    Every option can also be set in the environment (REPRISE_MAX_TOKENS for --max-tokens) or in a configuration file
    (max-tokens = 512). `reprise config` prints what is in force and where it comes from.
    """
    has_size = configuration.chosen["disk_bytes"].source != DEFAULT
    settings, memory_line = with_disk(configuration.settings(), has_size=has_size)
    table = settings.models.get(settings.model, {})
    check_process_limits(table.get("model", settings.model))
    if settings.is_tensor_parallel:
        ranks().check_rank(settings, os.environ)
        if int(os.environ["MLX_RANK"]) > 0:
            with ended_by_interrupt():
                ranks().follow_rank_0(settings)
            return
    # Until `run_server` handles signals.
    with refusals(), ended_by_interrupt():
        # Before the imports, which take seconds: the start is logged, and early requests get a 503.
        configure_logging(settings)
        if memory_line is not None:
            log.warning(memory_line)
        inherited = inherited_listener(os.environ)
        listener = listen(settings.host, settings.port) if inherited is None else inherited
        # Who made a service manager start this process waits for it.
        first = FirstAnswers(listener, WebAccess(settings)) if inherited is None else None
        until = "get a 503" if inherited is None else "wait"
        log.info("starting at %s; requests %s until %s is loaded", url_of(listener), until, settings.model)
        from reprise.cli.engines import run_server  # noqa: PLC0415 (imports MLX)

        run_server(settings, listener, first)


def with_disk(settings: Settings, *, has_size: bool) -> tuple[Settings, str | None]:
    """The settings of a server that keeps prefixes on disk unless that is off. `has_size`: --disk-bytes is set.

    And why they are in memory alone where nobody chose that, with what to do. Ranks keep parts of records, each in a
    separate directory that has to be named.
    """
    if settings.disk_directory == OFF or not settings.has_prefix_cache:
        return replace(settings, disk_directory=None), None
    if settings.disk_directory is not None or settings.is_tensor_parallel:
        return settings, None
    place = default_directory()
    reason = why_unusable(place)
    if reason is not None:
        return settings, f"prefixes in memory alone, since {reason}. Choose a place: --disk-cache DIRECTORY"
    size = settings.disk_bytes if has_size else Bytes(default_nbytes(place))
    return replace(settings, disk_directory=str(place), disk_bytes=size), None
