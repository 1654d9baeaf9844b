"""`POST /v1/completions`."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fastapi import Request
from starlette.responses import Response

from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import openai_shape
from reprise.api.http.sse import DONE, comment_line, data_line, while_connected
from reprise.api.openai.chat_reply import Decode, usage_body
from reprise.api.openai.completions_body import CompletionsBody, service_requests_of
from reprise.api.service.batch import Batch, start_batch
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, RawPrompt, ServiceRequest, StillWaiting, Usage
from reprise.api.wire.background import refuse_unstreamed
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, GoesOn, InContext, Namespace
from reprise.chat.answer import ContentDelta
from reprise.core.events import Sampled

router = api_router("OpenAI")


@router.post("/v1/completions", response_model=None)
async def create_completion(
    body: CompletionsBody, request: Request, context: InContext, namespace: Namespace, goes_on: GoesOn = False
) -> Response:
    """Continue a text."""
    echoes = body.echo is True
    request_id = body.request_id
    if body.stream is not True:
        refuse_unstreamed(goes_on=goes_on)
        made = await while_connected(request.receive, _whole(context, request_id, body, namespace, echoes=echoes))
        return JsonResponse(made, headers={"x-request-id": request_id})
    options = body.stream_options
    batch = await while_connected(request.receive, _start(context, request_id, body, namespace))
    return await context.background.respond(
        batch,
        _tell(
            context,
            request_id,
            batch,
            echoes=echoes,
            includes_usage=options is not None and options.include_usage is True,
        ),
        goes_on=goes_on,
        namespace=namespace,
        request_id=request_id,
        on_error=lambda problem: data_line(openai_shape(problem)),
    )


async def _start(context: Context, request_id: str, body: CompletionsBody, namespace: str) -> Batch:
    service = context.service
    requests = await service.off_loop(
        lambda: service_requests_of(
            body, request_id=request_id, namespace=namespace, served=service.served, limits=service.limits
        )
    )
    # As many answers at a time as one prompt may have.
    num_at_once = max(1, service.limits.max_choices // requests[0].num_choices)
    return await start_batch(service, requests, num_at_once=num_at_once)


async def _whole(
    context: Context, request_id: str, body: CompletionsBody, namespace: str, *, echoes: bool
) -> dict[str, Any]:
    decode = context.service.served.text.decode
    batch = await _start(context, request_id, body, namespace)
    requests = batch.requests
    tokens: dict[int, list[Sampled]] = {}
    prompts = [_first_of(one) for one in requests]
    ended: dict[int, tuple[int, AnswerEnd]] = {}
    async with batch:
        async for number, event in batch.events():
            match event:
                case AnswerDelta():
                    prompts[number].extend(event.prompt)
                    tokens.setdefault(_index(requests, number, event.choice), []).extend(event.tokens)
                case AnswerEnd():
                    ended[_index(requests, number, event.choice)] = (number, event)
                case _:
                    pass
    choices: list[dict[str, Any]] = []
    for index in _best(body, requests, tokens, sorted(ended)):
        number, end = ended[index]
        text = _echo(requests[number], decode, echoes=echoes) + (end.answer.content or "")
        shown = [*prompts[number], *tokens.get(index, [])] if body.logprobs is not None else []
        choices.append(_choice(len(choices), text, logprobs=_logprobs(shown, decode), finish_reason=str(end.reason)))
    return _body(context, request_id, batch, choices) | {"usage": usage_body(_usage(batch))}


def _first_of(request: ServiceRequest) -> list[Sampled]:
    """The first token of a prompt whose tokens are told with their log-probabilities: nothing comes before it."""
    assert isinstance(request.prompt, RawPrompt)
    return [] if request.prompt_logprobs is None else [Sampled(token=int(request.prompt.tokens[0]))]


def _best(
    body: CompletionsBody,
    requests: Sequence[ServiceRequest],
    tokens: Mapping[int, Sequence[Sampled]],
    indices: list[int],
) -> list[int]:
    """Which answers are given: of each prompt the `n` whose tokens are likeliest on average, best first."""
    num_sampled, num_given = requests[0].num_choices, body.n or 1
    if num_sampled == num_given:
        return indices

    def mean(index: int) -> float:
        scores = [token.logprob for token in tokens.get(index, ()) if token.logprob is not None]
        return sum(scores) / len(scores) if scores else 0.0

    best: list[int] = []
    for start in range(0, len(indices), num_sampled):
        best += sorted(indices[start : start + num_sampled], key=mean, reverse=True)[:num_given]
    return best


async def _tell(
    context: Context, request_id: str, batch: Batch, *, echoes: bool, includes_usage: bool
) -> AsyncGenerator[str, None]:
    decode = context.service.served.text.decode
    requests = batch.requests
    # Where the next token's text begins within its answer.
    offsets: dict[int, int] = {}

    def echoed(number: int, text: str, scored: Sequence[Sampled]) -> Iterator[str]:
        """A piece of a prompt, to all its answers."""
        for choice in range(requests[number].num_choices):
            index = _index(requests, number, choice)
            logprobs = _logprobs(scored, decode, offset=offsets.get(index, 0))
            offsets[index] = offsets.get(index, 0) + len(text)
            yield data_line(_body(context, request_id, batch, [_choice(index, text, logprobs=logprobs)]))

    for number, one in enumerate(requests if echoes else ()):
        first = _first_of(one)
        text = _joined(first, decode) if first else _echo(one, decode, echoes=True)
        for line in echoed(number, text, first):
            yield line
    async for number, event in batch.events():
        match event:
            case StillWaiting():
                # Clients that give up on a silent stream count chunks, and not comments.
                waiting = _choice(_index(requests, number, 0), "")
                yield comment_line(event.text) + data_line(_body(context, request_id, batch, [waiting]))
            case AnswerDelta() if event.prompt:
                for line in echoed(number, _joined(event.prompt, decode), event.prompt):
                    yield line
            case AnswerDelta():
                text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
                index = _index(requests, number, event.choice)
                logprobs = _logprobs(event.tokens, decode, offset=offsets.get(index, 0))
                offsets[index] = offsets.get(index, 0) + sum(len(decode([token.token])) for token in event.tokens)
                made = _choice(index, text, logprobs=logprobs)
                yield data_line(_body(context, request_id, batch, [made]))
            case AnswerEnd():
                made = _choice(_index(requests, number, event.choice), "", finish_reason=str(event.reason))
                yield data_line(_body(context, request_id, batch, [made]))
            case _:
                pass
    if includes_usage:
        yield data_line(_body(context, request_id, batch, []) | {"usage": usage_body(_usage(batch))})
    yield DONE


def _index(requests: Sequence[ServiceRequest], number: int, choice: int) -> int:
    """The index of a choice in the response: all answers of the first prompt, then those of the second."""
    return number * requests[0].num_choices + choice


def _echo(request: ServiceRequest, decode: Decode, *, echoes: bool) -> str:
    assert isinstance(request.prompt, RawPrompt)
    return decode(request.prompt.tokens.tolist()) if echoes else ""


def _choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _body(context: Context, request_id: str, batch: Batch, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(batch.replies[0].created),
        "model": context.service.served.id,
        "choices": choices,
    }


def _logprobs(tokens: Sequence[Sampled], decode: Decode, *, offset: int = 0) -> dict[str, Any] | None:
    if not tokens:
        return None
    texts = [_name(token.token, decode) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token, decode) for token in tokens],
        "text_offset": list(accumulate((len(text) for text in texts[:-1]), initial=offset)),
    }


def _top(token: Sampled, decode: Decode) -> dict[str, float] | None:
    """The likeliest tokens and the one that stands there, as in OpenAI's API; None for a prompt's first token."""
    if token.logprob is None:
        return None
    return {_name(top, decode): logprob for top, logprob in token.top} | {_name(token.token, decode): token.logprob}


def _name(token: int, decode: Decode) -> str:
    """The text of a token. Parts of characters have none, and would all look alike: those are named by number."""
    text = decode([token])
    return f"token_id:{token}" if "\ufffd" in text else text


def _joined(tokens: Sequence[Sampled], decode: Decode) -> str:
    return decode([token.token for token in tokens])


def _usage(batch: Batch) -> Usage:
    usages = [reply.usage for reply in batch.replies]
    return Usage(
        num_prompt=sum(usage.num_prompt for usage in usages),
        num_cached=sum(usage.num_cached for usage in usages),
        num_stored=sum(usage.num_stored for usage in usages),
        num_completion=sum(usage.num_completion for usage in usages),
        num_accepted=sum(usage.num_accepted for usage in usages),
        num_rejected=sum(usage.num_rejected for usage in usages),
    )
