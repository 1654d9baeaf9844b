"""`reprise serve MODEL`."""

import os

from reprise.api.http.listening import FirstAnswers, listen
from reprise.api.http.web_access import WebAccess
from reprise.cli.configuration import Configuration, with_options
from reprise.cli.entry import ended_by_interrupt
from reprise.cli.process_limits import check_process_limits
from reprise.cli.refuse import refusals
from reprise.cli.wings import ranks
from reprise.core.settings import OPTIONS


@with_options(OPTIONS)
def serve(configuration: Configuration) -> None:
    """Serve a model over HTTP, with the OpenAI, Anthropic and Ollama APIs.

    Every option can also be set in the environment (REPRISE_MAX_TOKENS for --max-tokens) or in a configuration file
    (max-tokens = 512). `reprise config` prints what is in force and where it comes from.
    """
    settings = configuration.settings()
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
        # Before the imports, which take seconds: who comes first is told to wait.
        listener = listen(settings.host, settings.port)
        first = FirstAnswers(listener, WebAccess(settings))
        from reprise.cli.engines import run_server  # noqa: PLC0415 (imports MLX)

        run_server(settings, listener, first)
