"""Requests that were refused: one line of the log and a record for each, so that the server is not blind to them."""

import logging
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from reprise.api.http.errors import PROBLEMS, Problem
from reprise.api.service.exchange import Record
from reprise.api.service.models import ServedModel
from reprise.api.service.service import ChatService, new_request_id
from reprise.api.wire.context import MODEL_IN_SCOPE
from reprise.core.errors import RequestCancelled

log = logging.getLogger(__name__)

_APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/api/chat": "ollama",
    "/api/embed": "ollama",
    "/api/generate": "ollama",
}
"""By the beginning of the path: the API's name in records."""

_ABOUT_THE_SERVER = ("/v1/cache/", "/v1/requests/", "/metrics", "/health")
"""Who asks what happened to requests is not to find this question in the answer."""

_BEYOND_400 = frozenset({503, 507})
_PATH_SHOWN = 200


class Refusals:
    """A layer around the application that hears of every problem that was answered."""

    def __init__(self, app: ASGIApp, *, service: ChatService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problems: list[tuple[Problem, Scope]] = []
        await self._app({**scope, PROBLEMS: problems}, receive, send)
        for problem, inner in problems:
            if _is_refusal(problem):
                self._tell(problem, inner, request_line=f"{scope['method']} {scope['path'][:_PATH_SHOWN]}")

    def _tell(self, problem: Problem, scope: Scope, *, request_line: str) -> None:
        path: str = scope["path"]
        log.warning("refused with %d (%s): %s: %s", problem.status, problem.code, request_line, problem.message)
        if path.startswith(_ABOUT_THE_SERVER):
            return
        self._service.note_record(
            Record(
                id=new_request_id("refused"),
                api=next((api for start, api in _APIS.items() if path.startswith(start)), "other"),
                model=self._model(scope),
                created=time.time(),
                namespace=scope.get("reprise.namespace", ""),
                ended="refused",
                outcomes=(),
                error=problem.message,
                status=problem.status,
                notes=(request_line,),
            )
        )

    def _model(self, scope: Scope) -> str:
        """Which model was asked for; "" if none that is served here."""
        if self._service.models is None:
            return self._service.served.id
        model: ServedModel[ChatService] | None = scope.get(MODEL_IN_SCOPE)
        return "" if model is None else model.id


def _is_refusal(problem: Problem) -> bool:
    is_clients = 400 <= problem.status < 500 and problem.status != RequestCancelled.status
    return is_clients or problem.status in _BEYOND_400
