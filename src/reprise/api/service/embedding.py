"""Embeddings: texts to inputs, inputs to vectors, and the record of it, as every API uses it."""

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np

from reprise.api.service.caller import Caller
from reprise.api.service.exchange import Record
from reprise.api.service.records import log_line
from reprise.api.service.served import Served
from reprise.api.service.service import ChatService
from reprise.core.embedding import Embedder, EmbeddingInput, EmbeddingJob, EmbeddingResult, Vectors
from reprise.core.errors import BadRequest, ContextTooLong, RepriseError, ShuttingDown
from reprise.core.outcome import Outcome, Reason
from reprise.core.tokens import Tokens, as_tokens

log = logging.getLogger(__name__)


def embedder_of(served: Served) -> Embedder:
    """The embedder that is served. Raises BadRequest for a model that makes text or scores."""
    if served.embedder is None:
        raise BadRequest(
            f"{served.id} is a chat model and makes no embeddings. Ask for an embedding model; for one whose files do "
            "not say that it is, start the server with --embedder.",
            param="model",
        )
    if served.embedder.is_reranker:
        raise BadRequest(f"{served.id} is a reranker: it scores documents at /v1/rerank, and makes no vectors.")
    return served.embedder


def text_inputs(
    texts: Sequence[str], embedder: Embedder, *, truncates: bool, prompt_name: str | None = None
) -> tuple[EmbeddingInput, ...]:
    """The inputs for these texts, each behind the prompt of that name. Raises BadRequest, ContextTooLong.

    `truncates`: what is too long loses its end.
    """
    before = _prompt(embedder, prompt_name)
    found: list[EmbeddingInput] = []
    for number, text in enumerate(texts):
        tokens = embedder.encode(before + text)
        tokens = embedder.truncated(tokens) if truncates else tokens
        found.append(_checked(as_tokens(tokens), embedder, number))
    return tuple(found)


def token_inputs(runs: Sequence[Sequence[int]], embedder: Embedder, *, truncates: bool) -> tuple[EmbeddingInput, ...]:
    """The inputs for tokens of this model, as they are. Raises BadRequest, ContextTooLong."""
    found: list[EmbeddingInput] = []
    for number, run in enumerate(runs):
        if any(not 0 <= token < embedder.vocab_size for token in run):
            raise BadRequest(
                f"Input {number} contains a token id that the model does not have (valid: 0 to "
                f"{embedder.vocab_size - 1}). Token ids are the model's own: LangChain sends those of OpenAI's models "
                "unless it is told check_embedding_ctx_length=False. Send texts.",
                param="input",
            )
        tokens = embedder.truncated(run) if truncates else run
        found.append(_checked(as_tokens(tokens), embedder, number))
    return tuple(found)


def _prompt(embedder: Embedder, name: str | None) -> str:
    if name is None:
        return ""
    if name not in embedder.prompts:
        known = ", ".join(embedder.prompts) or "none"
        raise BadRequest(f"The model has no prompt {name!r}. Its prompts: {known}.", param="prompt_name")
    return embedder.prompts[name]


def _checked(tokens: Tokens, embedder: Embedder, number: int) -> EmbeddingInput:
    if len(tokens) == 0:
        raise BadRequest(f"Input {number} is empty. Send a text.", param="input")
    if embedder.max_tokens is not None and len(tokens) > embedder.max_tokens:
        raise ContextTooLong(
            f"Input {number} has {len(tokens)} tokens, and the model reads at most {embedder.max_tokens}. Send shorter "
            "texts, or `truncate`: true to leave out the end.",
            param="input",
        )
    return EmbeddingInput(tokens=tokens)


def shortened(vectors: Vectors, num_dimensions: int | None) -> Vectors:
    """The first dimensions, as a vector of length 1 again. Raises BadRequest if there are fewer."""
    if num_dimensions is None:
        return vectors
    width = vectors.shape[1]
    if not 1 <= num_dimensions <= width:
        raise BadRequest(f"`dimensions` is {num_dimensions}; the model's vectors have {width}.", param="dimensions")
    cut = vectors[:, :num_dimensions]
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)


async def embed(
    service: ChatService,
    inputs: tuple[EmbeddingInput, ...],
    *,
    request_id: str,
    api: str,
    namespace: str,
    caller: Caller,
    notes: tuple[str, ...],
) -> EmbeddingResult:
    """The vectors or scores of a request; its record is written. Cancelled when the caller is.

    `api`: its name in records, `embeddings`, `rerank` or `ollama`. Raises QueueFull and the like.
    """
    if service.is_closing:
        raise ShuttingDown("The server is shutting down. Try again in a moment.")
    began_s, created = time.monotonic(), time.time()
    job = EmbeddingJob(id=request_id, inputs=inputs, namespace=service.cache_namespace(namespace))

    def note(ended: str, outcome: Outcome, error: RepriseError | None = None) -> None:
        record = Record(
            id=request_id,
            api=api,
            model=service.served.id,
            created=created,
            namespace=namespace,
            ended=ended,
            outcomes=(outcome,),
            error=None if error is None else str(error),
            caller=caller,
            notes=notes,
        )
        names_model = service.models is not None and len(service.models.all) > 1
        log.info("%s", log_line(record, names_model=names_model))
        service.note_record(record)

    try:
        result = await asyncio.wrap_future(service.backend.embed(job))
    except asyncio.CancelledError:
        note("cancelled", Outcome(num_prompt=job.num_tokens, total_s=time.monotonic() - began_s))
        raise
    except RepriseError as error:
        note("failed", Outcome(num_prompt=job.num_tokens, total_s=time.monotonic() - began_s), error)
        raise
    note("stop", outcome_of(result))
    return result


def outcome_of(result: EmbeddingResult) -> Outcome:
    """The counts of a request in the terms of the others: what was there already is reused, the rest is prefilled."""
    reasons = {0: Reason.COLD, result.num_tokens: Reason.NOTHING_NEW}
    return Outcome(
        num_prompt=result.num_tokens,
        num_matched=result.num_repeated,
        num_reused=result.num_repeated,
        num_prefilled=result.num_tokens - result.num_repeated,
        reason=reasons.get(result.num_repeated, Reason.NEW_TOKENS),
        queued_s=result.queued_s,
        prefill_s=result.total_s - result.queued_s,
        total_s=result.total_s,
    )
