"""`/api/embed`, and `/api/embeddings`, its predecessor."""

import time
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from reprise.api.http.body import Body
from reprise.api.http.encoding import JsonResponse
from reprise.api.http.off_loop import Stage
from reprise.api.ollama.body import Options
from reprise.api.ollama.library import dismiss_after
from reprise.api.ollama.reply import OllamaErrorBody
from reprise.api.ollama.request import API, model_name
from reprise.api.service.embedding import embedder_of, shortened, text_inputs
from reprise.api.service.service import new_request_id
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall
from reprise.core.embedding import EmbeddingResult

router = api_router("Ollama", errors=OllamaErrorBody)

_NS = 1_000_000_000


class EmbedBody(Body):
    """Texts to make vectors of; what is too long loses its end unless `truncate` is false."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbeddingPromptBody(Body):
    """One text."""

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


@router.post("/api/embed", response_model=None)
async def create_embed(body: EmbedBody, call: OfModel) -> Response:
    """The vectors of texts."""
    service, began_s = call.service, time.monotonic()
    service.served.check_name(model_name(body.model))
    given = body.input or []
    texts = [given] if isinstance(given, str) else given

    async def answer() -> Response:
        vectors, num_tokens = [], 0
        if texts:
            result = await _embed(call, texts, truncates=body.truncate is not False)
            num_tokens = result.num_tokens
            vectors = await service.threads.run(Stage.END, lambda: shortened(result.vectors, body.dimensions).tolist())
        dismiss_after(body.model, body.keep_alive, call)
        about = {"model": service.served.id, "total_duration": int((time.monotonic() - began_s) * _NS)}
        return JsonResponse({**about, "embeddings": vectors, "load_duration": 0, "prompt_eval_count": num_tokens})

    return await call.while_connected(answer())


@router.post("/api/embeddings", response_model=None)
async def create_embeddings(body: EmbeddingPromptBody, call: OfModel) -> Response:
    """The vector of one text."""
    call.service.served.check_name(model_name(body.model))

    async def answer() -> Response:
        vector: list[Any] = []
        if body.prompt:
            result = await _embed(call, [body.prompt], truncates=True)
            vector = result.vectors[0].tolist()
        dismiss_after(body.model, body.keep_alive, call)
        return JsonResponse({"embedding": vector})

    return await call.while_connected(answer())


async def _embed(call: RouteCall, texts: list[str], *, truncates: bool) -> EmbeddingResult:
    embedder = embedder_of(call.service.served)
    inputs = await call.service.off_loop(lambda: text_inputs(texts, embedder, truncates=truncates))
    return await call.embed(inputs, request_id=new_request_id(API), api=API)
