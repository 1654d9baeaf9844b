"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from starlette.responses import Response

import reprise
from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import Problem
from reprise.api.ollama.body import AnswerBody, GenerateBody, OllamaChatBody, ShowBody
from reprise.api.ollama.library import dismiss_after, ends_with_request
from reprise.api.ollama.reply import (
    NDJSON,
    Kind,
    OllamaErrorBody,
    counts,
    line,
    ollama_shape,
    piece,
    with_logprobs,
)
from reprise.api.ollama.request import model_name, request_of
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, StillWaiting
from reprise.api.service.models import ServedModel
from reprise.api.service.reply import Reply
from reprise.api.service.served import Served
from reprise.api.service.service import ChatService
from reprise.api.wire.background import HEADER
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall
from reprise.api.wire.wire import Wire, respond, start_reply
from reprise.chat.answer import ContentDelta, ReasoningDelta
from reprise.core.backend import WeightsState
from reprise.core.errors import BadRequest

PREFIX = "/api/"
SPOKEN_VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients compare it before they use what came with a version."""


router = api_router("Ollama", errors=OllamaErrorBody)


@router.post("/api/chat", response_model=None)
async def chat(body: OllamaChatBody, call: OfModel) -> Response:
    """Answer a chat; by default as JSON lines."""
    return await (_answer if body.messages else _loaded)("chat", body, call)


@router.post("/api/generate", response_model=None)
async def generate(body: GenerateBody, call: OfModel) -> Response:
    """Answer a prompt; by default as JSON lines."""
    return await (_answer if body.prompt or body.suffix else _loaded)("generate", body, call)


@router.get("/api/tags")
async def tags(call: OfModel) -> dict[str, Any]:
    """The models that are served."""
    if call.context.models is None:
        return {"models": [_model(call.service.served)]}
    return {"models": [_listed(model) for model in call.context.models.all]}


@router.get("/api/ps")
async def running(call: OfModel) -> dict[str, Any]:
    """The models that are loaded."""
    if call.context.models is None:
        return {"models": [_running(call.service.served)]}
    loaded = [model for model in call.context.models.all if model.state is WeightsState.READY]
    return {"models": [_running(model.service.served) for model in loaded if model.service is not None]}


@router.post("/api/show")
async def show(body: ShowBody, call: OfModel) -> dict[str, Any]:
    """What the model is and can do."""
    served = call.service.served
    served.check_name(model_name(body.model or body.name))
    text, kind = served.text, served.architecture or "unknown"
    capabilities = [
        "completion" if served.embedder is None else "rerank" if served.embedder.is_reranker else "embedding",
        *(["vision"] if served.image_limits is not None else []),
        *(["tools"] if text.tool_start is not None or text.parse_tool_call is not None else []),
        *(["thinking"] if text.think_start is not None or text.initial_state is not None else []),
    ]
    model_info: dict[str, Any] = {"general.architecture": kind, "general.basename": served.id}
    if served.context is not None:
        model_info[f"{kind}.context_length"] = served.context
    if served.embedder is not None:
        model_info[f"{kind}.embedding_length"] = served.embedder.num_dimensions
    return {
        "modelfile": f"FROM {served.id}\n",
        "parameters": _parameters(served),
        "template": text.template_source,
        "details": _details(served),
        "model_info": model_info,
        "capabilities": capabilities,
        "modified_at": _created_at(served),
    }


@router.get("/api/version")
async def version() -> dict[str, Any]:
    """The version of the API that is spoken, and ours."""
    return {"version": SPOKEN_VERSION, "reprise": reprise.__version__}


async def _loaded(kind: Kind, body: AnswerBody, call: RouteCall) -> Response:
    served, models = call.service.served, call.context.models
    served.check_name(model_name(body.model))
    is_unload = ends_with_request(body.keep_alive)
    if is_unload and models is not None:
        # As `ollama stop` does. A model that is alone stays loaded.
        await models.of(model_name(body.model)).unloaded()
    return JsonResponse(piece(kind, served.id) | {"done": True, "done_reason": "unload" if is_unload else "load"})


async def _answer(kind: Kind, body: OllamaChatBody | GenerateBody, call: RouteCall) -> Response:
    if call.request.headers.get(HEADER, "false") != "false":
        raise BadRequest("JSON lines have no ids to resume from. Use /v1/chat/completions for background answers.")

    async def start() -> OllamaWire:
        reply = await start_reply(call, lambda: request_of(body, call.asked))
        return OllamaWire(call, reply, kind=kind, on_end=lambda: dismiss_after(body.model, body.keep_alive, call))

    return await respond(call, start, is_streamed=body.stream is not False)


class OllamaWire(Wire[Reply]):
    """An answer as JSON lines, or as one object."""

    error_format = staticmethod(ollama_shape)
    stream_headers: ClassVar[Mapping[str, str]] = NDJSON

    def __init__(self, call: RouteCall, reply: Reply, *, kind: Kind, on_end: Callable[[], None]) -> None:
        super().__init__(call, reply, request_id=reply.request.id)
        self._piece = partial(piece, kind, self.served.id)
        self._on_end = on_end

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        # Lines of JSON have no comments: an empty piece.
        yield line(self._piece())

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        # Calls are given whole, when they are over.
        content = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        thinking = "".join(delta.text for delta in event.deltas if isinstance(delta, ReasoningDelta))
        if content or thinking or event.tokens:
            yield line(with_logprobs(self._piece(content=content, thinking=thinking), event.tokens, self.decode))

    def end(self, event: AnswerEnd) -> Iterator[str]:
        if event.answer.tool_calls:
            yield line(self._piece(calls=event.answer.tool_calls))
        self._on_end()
        yield line(self._piece() | counts(event, self.reply))

    def error(self, problem: Problem) -> str:
        return line(ollama_shape(problem))

    def whole(self) -> dict[str, Any]:
        (ended,) = self.ended
        self._on_end()
        answer = ended.answer
        said = self._piece(content=answer.content or "", thinking=answer.reasoning or "", calls=answer.tool_calls)
        return with_logprobs(said | counts(ended, self.reply), self.tokens[ended.choice], self.decode)


def _running(served: Served) -> dict[str, Any]:
    # When its weights are unloaded depends on what others need.
    stays = {"expires_at": "9999-12-31T00:00:00Z", "size_vram": served.nbytes, "context_length": served.context or 0}
    return _model(served) | stays


def _listed(model: ServedModel[ChatService]) -> dict[str, Any]:
    if model.service is not None:
        return _model(model.service.served)
    # What it is, its files say when it is loaded.
    return {"name": model.id, "model": model.id, "size": model.nbytes, "details": {"format": "mlx"}}


def _model(served: Served) -> dict[str, Any]:
    return {
        "name": served.id,
        "model": served.id,
        "modified_at": _created_at(served),
        "size": served.nbytes,
        "digest": hashlib.sha256(served.id.encode()).hexdigest(),
        "details": _details(served),
    }


def _parameters(served: Served) -> str:
    """The sampling of requests that do not choose theirs, as lines of a Modelfile."""
    sampling, _ = served.sampling.sampling({})
    chosen = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return "\n".join(f"{name:<30} {value:g}" for name, value in chosen.items())


def _count_text(count: int) -> str:
    """A number as Ollama writes it: 7.6B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _details(served: Served) -> dict[str, Any]:
    family = served.architecture or "unknown"
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": "" if served.num_parameters is None else _count_text(served.num_parameters),
        "quantization_level": served.quantisation,
    }


def _created_at(served: Served) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")
