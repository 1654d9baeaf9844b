"""`POST /v1/completions`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from starlette.responses import Response

from reprise.api.http.sse import DONE, comment_line, data_line
from reprise.api.openai.chat_reply import Decode, usage_body
from reprise.api.openai.completions_body import CompletionsBody, service_requests_of
from reprise.api.service.batch import Batch, start_batch
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, RawPrompt, ServiceRequest, StillWaiting, Usage
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import RouteCall, ToAnswer
from reprise.api.wire.wire import Wire, respond
from reprise.chat.answer import ContentDelta
from reprise.core.events import Sampled

router = api_router("OpenAI")


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionsBody, call: ToAnswer) -> Response:
    """Continue a text."""

    async def start() -> CompletionsWire:
        service = call.service
        requests = await service.off_loop(lambda: service_requests_of(body, call.asked))
        # As many answers at a time as one prompt may have.
        num_at_once = max(1, service.limits.max_choices // requests[0].num_choices)
        return CompletionsWire(call, await start_batch(service, requests, num_at_once=num_at_once), body)

    return await respond(call, start, is_streamed=body.stream is True)


class CompletionsWire(Wire[Batch]):
    """Answers as text completions: all of the first prompt, then those of the second."""

    def __init__(self, call: RouteCall, batch: Batch, body: CompletionsBody) -> None:
        super().__init__(call, batch, request_id=body.request_id)
        self._body = body
        self._num_choices = batch.requests[0].num_choices
        self._prompts = [_first_of(one) for one in batch.requests]
        """The tokens of each prompt with log-probabilities."""
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Where the next token's text begins within its answer."""

    def begin(self) -> Iterator[str]:
        if self._body.echo is not True:
            return
        for number, one in enumerate(self.reply.requests):
            first = self._prompts[number]
            yield from self._echoed(number, self._text(first) if first else self._prompt_text(one), first)

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        # Clients that give up on a silent stream count chunks, and not comments.
        yield comment_line(event.text) + self._line(_choice(event.choice, ""))

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        if event.prompt:
            yield from self._echoed(event.choice // self._num_choices, self._text(event.prompt), event.prompt)
            return
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        logprobs = _logprobs(event.tokens, self.decode, offset=self._offsets[event.choice])
        self._offsets[event.choice] += sum(len(self.decode([token.token])) for token in event.tokens)
        yield self._line(_choice(event.choice, text, logprobs=logprobs))

    def end(self, event: AnswerEnd) -> Iterator[str]:
        yield self._line(_choice(event.choice, "", finish_reason=str(event.reason)))

    def done(self) -> Iterator[str]:
        options = self._body.stream_options
        if options is not None and options.include_usage is True:
            yield data_line(self._object([]) | {"usage": usage_body(_usage(self.reply))})
        yield DONE

    def take(self, event: AnswerDelta) -> None:
        self._prompts[event.choice // self._num_choices].extend(event.prompt)
        super().take(event)

    def whole(self) -> dict[str, Any]:
        ended = {end.choice: end for end in self.ended}
        choices: list[dict[str, Any]] = []
        for index in _best(self._body, self._num_choices, self.tokens, sorted(ended)):
            number, end = index // self._num_choices, ended[index]
            echo = self._prompt_text(self.reply.requests[number]) if self._body.echo is True else ""
            shown = [*self._prompts[number], *self.tokens[index]] if self._body.logprobs is not None else []
            logprobs, text = _logprobs(shown, self.decode), echo + (end.answer.content or "")
            choices.append(_choice(len(choices), text, logprobs=logprobs, finish_reason=str(end.reason)))
        return self._object(choices) | {"usage": usage_body(_usage(self.reply))}

    def _echoed(self, number: int, text: str, scored: Sequence[Sampled]) -> Iterator[str]:
        """A piece of a prompt, to all its answers."""
        for index in range(number * self._num_choices, (number + 1) * self._num_choices):
            logprobs = _logprobs(scored, self.decode, offset=self._offsets[index])
            self._offsets[index] += len(text)
            yield self._line(_choice(index, text, logprobs=logprobs))

    def _line(self, choice: dict[str, Any]) -> str:
        return data_line(self._object([choice]))

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.request_id, "object": "text_completion", "created": int(self.reply.replies[0].created)}
        return {**about, "model": self.served.id, "choices": choices}

    def _text(self, tokens: Sequence[Sampled]) -> str:
        return self.decode([token.token for token in tokens])

    def _prompt_text(self, request: ServiceRequest) -> str:
        assert isinstance(request.prompt, RawPrompt)
        return self.decode(request.prompt.tokens.tolist())


def _first_of(request: ServiceRequest) -> list[Sampled]:
    """The first token of a prompt that is echoed with log-probabilities: it has none, since nothing precedes it."""
    assert isinstance(request.prompt, RawPrompt)
    return [] if request.prompt_logprobs is None else [Sampled(token=int(request.prompt.tokens[0]))]


def _best(
    body: CompletionsBody,
    num_sampled: int,
    tokens: Mapping[int, Sequence[Sampled]],
    indices: list[int],
) -> list[int]:
    """Which answers are given: of each prompt the `n` whose tokens are likeliest on average, best first."""
    num_given = body.n or 1
    if num_sampled == num_given:
        return indices

    def mean(index: int) -> float:
        scores = [token.logprob for token in tokens.get(index, ()) if token.logprob is not None]
        return sum(scores) / len(scores) if scores else 0.0

    best: list[int] = []
    for start in range(0, len(indices), num_sampled):
        best += sorted(indices[start : start + num_sampled], key=mean, reverse=True)[:num_given]
    return best


def _choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


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
