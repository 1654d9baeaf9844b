"""`POST /v1/embeddings`, and `POST /v1/rerank` as Jina, Cohere and llama.cpp's server have it."""

import base64
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from reprise.api.http.body import Body, unknown_fields
from reprise.api.http.encoding import JsonResponse
from reprise.api.http.off_loop import Stage
from reprise.api.service.embedding import embedder_of, shortened, text_inputs, token_inputs
from reprise.api.service.served import Served
from reprise.api.service.service import ChatService, new_request_id
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel
from reprise.core.embedding import EmbeddingInput, EmbeddingResult, Vectors
from reprise.core.errors import BadRequest

router = api_router("OpenAI")

_IGNORED = frozenset({"user", "input_type", "truncate_prompt_tokens", "max_tokens_per_doc", "rank_fields", "priority"})


class EmbeddingsBody(Body):
    """Texts, or tokens of the model, to make vectors of."""

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None
    """Leave out the end of what is too long, which is refused otherwise."""
    prompt_name: str | None = None
    """One of the model's prompts, which stands before each text."""


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(Body):
    """A query, and documents to put in order."""

    model: str | None = None
    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    """The same, as text-embeddings-inference calls it."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


@router.post("/v1/embeddings", response_model=None)
async def create_embeddings(body: EmbeddingsBody, call: OfModel) -> Response:
    """The vectors of texts."""
    service = call.service
    served = service.served
    served.check_name(body.model)
    notes = unknown_fields(body, ignored=_IGNORED, refused={})

    async def answer() -> Response:
        request_id = new_request_id("embd")
        inputs = await service.off_loop(lambda: _inputs(body, served))
        result = await call.embed(inputs, request_id=request_id, api="embeddings", notes=notes)
        # A thousand vectors are some ten MB of digits.
        return await service.threads.run(Stage.END, lambda: _response(body, result, request_id, served))

    return await call.while_connected(answer())


def _inputs(body: EmbeddingsBody, served: Served) -> tuple[EmbeddingInput, ...]:
    embedder, given, truncates = embedder_of(served), body.input, body.truncate is True
    if body.dimensions is not None and body.dimensions > embedder.num_dimensions:
        raise BadRequest(
            f"`dimensions` is {body.dimensions}; the model's vectors have {embedder.num_dimensions}.",
            param="dimensions",
        )
    if isinstance(given, str):
        return text_inputs([given], embedder, truncates=truncates, prompt_name=body.prompt_name)
    if len(given) == 0:
        raise BadRequest("`input` is empty. Send at least one text.", param="input")
    texts = [each for each in given if isinstance(each, str)]
    runs = [each for each in given if isinstance(each, list)]
    if texts:
        return text_inputs(texts, embedder, truncates=truncates, prompt_name=body.prompt_name)
    return token_inputs(
        runs if runs else [[each for each in given if isinstance(each, int)]], embedder, truncates=truncates
    )


def _response(body: EmbeddingsBody, result: EmbeddingResult, request_id: str, served: Served) -> Response:
    vectors = shortened(result.vectors, body.dimensions)
    is_packed = body.encoding_format == "base64"
    return JsonResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(_packed(vectors) if is_packed else vectors.tolist())
            ],
            "model": served.id,
            "usage": usage_of(result),
        },
        headers={"x-request-id": request_id},
    )


def _packed(vectors: Vectors) -> list[str]:
    """Each as its little-endian bytes in base64."""
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


def usage_of(result: EmbeddingResult) -> dict[str, Any]:
    """Counts as OpenAI gives them; `cached_tokens` are those of exact repeats."""
    return {
        "prompt_tokens": result.num_tokens,
        "total_tokens": result.num_tokens,
        "prompt_tokens_details": {"cached_tokens": result.num_repeated},
    }


@router.post("/v1/rerank", response_model=None)
@router.post("/v1/reranking", response_model=None)
@router.post("/v2/rerank", response_model=None)
async def rerank(body: RerankBody, call: OfModel) -> Response:
    """How well each document answers the query, from 0 to 1, the best first."""
    service = call.service
    service.served.check_name(body.model)
    notes = unknown_fields(body, ignored=_IGNORED, refused={})
    texts = [each if isinstance(each, str) else each.text for each in body.documents or body.texts or ()]
    if not texts:
        raise BadRequest("`documents` is empty. Send at least one text.", param="documents")

    async def answer() -> Response:
        request_id = new_request_id("rerank")
        inputs = await _pairs(body.query, texts, service)
        result = await call.embed(inputs, request_id=request_id, api="rerank", notes=notes)
        scores = result.vectors[:, 0].tolist()
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        document = {index: {"document": {"text": texts[index]}} if body.return_documents else {} for index in order}
        results = [{"index": index, "relevance_score": scores[index], **document[index]} for index in order]
        about = {"id": request_id, "object": "list", "model": service.served.id, "usage": usage_of(result)}
        return JsonResponse({**about, "results": results}, headers={"x-request-id": request_id})

    return await call.while_connected(answer())


async def _pairs(query: str, texts: list[str], service: ChatService) -> tuple[EmbeddingInput, ...]:
    embedder = service.served.embedder
    if embedder is None or embedder.encode_pair is None:
        raise BadRequest(
            f"{service.served.id} is no reranker. Ask for one; a causal one that is asked yes or no is started with "
            "--embedder yes-no.",
            param="model",
        )
    encode = embedder.encode_pair
    return await service.off_loop(lambda: tuple(encode(query, text) for text in texts))
