"""The body of `POST /v1/completions`, and the internal requests that it asks for: one for each prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, cast

from pydantic import Field

from reprise.api.http.body import answer_bound
from reprise.api.openai.chat_body import ResponseFormat, StreamOptions
from reprise.api.openai.chat_request import response_grammar
from reprise.api.openai.fields import Retention, SamplingFields, num_choices_of, retained_for_s, sampling_of
from reprise.api.service.exchange import RawPrompt, ServiceRequest
from reprise.api.service.served import Asked, Served
from reprise.api.wire.controls import check_stream_options, checked_notes, grammar_of, stop_tokens_of
from reprise.chat.rendering.infill import InfillMarkers, infill_markers
from reprise.chat.templates.piecewise_tokenizer import encode_long
from reprise.chat.text_model import refuse_if_too_long
from reprise.core.errors import BadRequest
from reprise.core.tokens import Tokens, as_tokens, join_tokens

IGNORED = frozenset({"user"})
REFUSED: dict[str, str] = {}


class CompletionsBody(SamplingFields):
    """Text to continue as it is: no chat template, no reasoning, no tools."""

    id_prefix = "cmpl-"
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    """0: nothing is sampled, which is of use with `echo` and `logprobs`."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """So many answers are sampled, and the `n` likeliest are given."""
    suffix: str | None = None
    """The text that follows the completion."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Retention | None = None


def _num_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]], served: Served) -> tuple[Tokens, ...]:
    """The tokens of each prompt. Raises BadRequest for an empty one, and for tokens that are none."""
    if isinstance(prompt, str):
        return (checked_tokens(text_tokens(prompt, served), served, param="prompt"),)
    texts = [item for item in prompt if isinstance(item, str)]
    runs = [item for item in prompt if isinstance(item, list)]
    if texts:
        return tuple(checked_tokens(text_tokens(text, served), served, param="prompt") for text in texts)
    if runs:
        return tuple(checked_tokens(run, served, param="prompt") for run in runs)
    return (checked_tokens([item for item in prompt if isinstance(item, int)], served, param="prompt"),)


def text_tokens(text: str, served: Served, *, adds_bos: bool = True) -> Tokens:
    """The tokens of a plain text, with the tokenizer's own beginning if `adds_bos` and it has one."""
    refuse_if_too_long(text, served.text, context=served.context, param="prompt")
    tokens = encode_long(served.text.encode, text)
    bos = served.text.bos
    if adds_bos and served.text.adds_bos and bos is not None and (len(tokens) == 0 or tokens[0] != bos):
        return join_tokens(as_tokens([bos]), tokens)
    return tokens


def checked_tokens(tokens: list[int] | Tokens, served: Served, *, param: str) -> Tokens:
    """The tokens as a run. Raises BadRequest if there are none, or one is not of this model."""
    if len(tokens) == 0:
        raise BadRequest(f"`{param}` is empty. Send at least one token.", param=param)
    vocab_size = served.text.vocab_size
    least, most = (min(tokens), max(tokens)) if isinstance(tokens, list) else (tokens.min(), tokens.max())
    if not (least >= 0 and most < vocab_size):
        raise BadRequest(f"`{param}` contains an invalid token id (valid: 0 to {vocab_size - 1}).", param=param)
    return as_tokens(tokens)


def service_requests_of(body: CompletionsBody, asked: Asked) -> tuple[ServiceRequest, ...]:
    """The requests that a body asks for. Raises BadRequest naming the field, or UnknownModel."""
    served, limits, request_id = asked.served, asked.limits, body.request_id
    notes = checked_notes(body, asked, ignored=IGNORED, refused=REFUSED)
    served.check_adapter(body.adapters)
    check_stream_options(body.stream_options, stream=body.stream)
    grammar = grammar_of(body, (response_grammar(body.response_format),))
    if grammar is not None:
        # The text continues where the prompt ends: no markup stands between them.
        grammar = replace(grammar, is_whole=True)
    if body.logprobs is not None and body.logprobs > limits.max_top_logprobs:
        raise BadRequest(
            f"`logprobs` is {body.logprobs}; at most {limits.max_top_logprobs} are returned.", param="logprobs"
        )
    num_given = num_choices_of(body, asked)
    num_choices = _num_sampled(body, num_given)
    # The best of several are those that the model finds likeliest.
    logprobs = 0 if body.logprobs is None and num_choices > num_given else body.logprobs
    sampling, origins = sampling_of(body, asked, logprobs=logprobs)
    markers = _markers(body, served)
    # Counted before the first is tokenized.
    if _num_prompts(body.prompt) * num_choices > limits.max_completions:
        raise BadRequest(
            f"Too many answers: at most {limits.max_completions} at once. Send fewer prompts.", param="prompt"
        )
    prompts = prompts_of(body.prompt, served)
    _check_together(prompts, asked)
    stop_tokens = stop_tokens_of(body, asked)
    if markers is not None and body.suffix is not None:
        after = cast(list[int], text_tokens(body.suffix, served, adds_bos=False).tolist())
        prompts = tuple(_infilled(markers, tokens, after, served) for tokens in prompts)
        stop_tokens |= markers.ends
    return tuple(
        ServiceRequest(
            id=request_id if len(prompts) == 1 else f"{request_id}-p{number}",
            response_id=request_id,
            api="completions",
            prompt=RawPrompt(tokens=tokens),
            sampling=sampling,
            origins=origins,
            num_choices=num_choices,
            max_tokens=answer_bound(body.n_predict if body.max_tokens is None else body.max_tokens),
            min_tokens=body.min_tokens or 0,
            ignores_eos=body.ignore_eos is True,
            stop_tokens=stop_tokens,
            generates=body.max_tokens != 0,
            prompt_logprobs=body.logprobs if body.echo is True else None,
            grammar=grammar,
            stops=asked.stops(body.stop),
            namespace=asked.namespace,
            chat=body.prompt_cache_key,
            retain_for_s=retained_for_s(body.prompt_cache_retention),
            notes=notes,
        )
        for number, tokens in enumerate(prompts)
    )


def _check_together(prompts: Sequence[Tokens], asked: Asked) -> None:
    """Raise BadRequest for prompts that are too long: together, for what is kept of all until the last is answered."""
    context = asked.served.context
    if context is None:
        return
    for tokens in prompts:
        asked.served.max_answer_tokens(len(tokens), 1)
    num_tokens, most = sum(map(len, prompts)), asked.limits.max_choices * context
    if num_tokens > most:
        raise BadRequest(
            f"The prompts have {num_tokens} tokens in total; at most {most} are accepted. Send fewer.",
            param="prompt",
        )


def _num_sampled(body: CompletionsBody, num_given: int) -> int:
    if body.best_of is None:
        return num_given
    if body.best_of < num_given:
        raise BadRequest(f"`best_of` is {body.best_of}, but `n` is {num_given}.", param="best_of")
    if body.best_of > num_given and body.stream is True:
        raise BadRequest("`best_of` cannot be streamed: the best answers are known only at the end.", param="best_of")
    return body.best_of


def _markers(body: CompletionsBody, served: Served) -> InfillMarkers | None:
    """The markers around prompt and suffix, where a suffix is given."""
    if body.suffix is None:
        return None
    markers = infill_markers(served.text.splitters)
    if markers is None:
        raise BadRequest(
            "`suffix` needs a fill-in-the-middle model, and this one has no tokens for it. Leave it out.",
            param="suffix",
        )
    if body.echo is True:
        raise BadRequest("`suffix` and `echo` cannot be used together.", param="echo")
    return markers


def _infilled(markers: InfillMarkers, tokens: Tokens, after: list[int], served: Served) -> Tokens:
    before = cast(list[int], tokens.tolist())
    # The tokenizer's own beginning stays in front of everything.
    head = before[:1] if served.text.adds_bos and before[:1] == [served.text.bos] else []
    return as_tokens([*head, *markers.prompt(before[len(head) :], after)])
