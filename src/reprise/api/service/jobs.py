"""Turns a request into the engine's jobs, one per answer, and says how each answer is to be read."""

from collections.abc import Callable
from dataclasses import replace

from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.reply import Choice
from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.stop import StopWatch
from reprise.chat.call_format import ModelCalls
from reprise.chat.request import ChatRequest
from reprise.chat.templates.rendered import Rendered
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from reprise.core.job import NO_LINEAGE, Constraint, Job, Lineage, Purpose, Thinking
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Tokens

# A detokenizer needs the token before to know whether a space begins the text; a few are plenty.
_NUM_CONTEXT = 8


def answer_format_of(
    request: ServiceRequest, text: TextModel, tokens: Tokens, *, rendered: Rendered | None, default_budget: int | None
) -> AnswerFormat:
    """How the answer to this request, whose prompt is `tokens`, is to be read."""
    is_thinking_open = rendered is not None and rendered.is_thinking_open
    context = tuple(int(token) for token in tokens[-_NUM_CONTEXT:] if token >= 0)
    if request.stop_tokens:
        text = replace(text, eos=text.eos | request.stop_tokens)
    if not isinstance(request.prompt, ChatRequest):
        return AnswerFormat(
            without_markup(text),
            stops=request.stops,
            is_content_open=True,
            tool_choice="none",
            context=context,
            min_tokens=request.min_tokens,
            holds_calls=True,
        )
    return AnswerFormat(
        text,
        stops=request.stops,
        is_thinking_open=is_thinking_open,
        is_thinking_over=rendered is not None and rendered.is_thinking_over,
        is_content_open=request.prompt.continue_final and not is_thinking_open,
        tools=tuple(request.prompt.tools),
        tool_choice=request.tool_choice,
        context=context,
        holds_calls=not request.streams_calls,
        thinking=_thinking(request, text, is_open=is_thinking_open, default_budget=default_budget),
        min_tokens=request.min_tokens,
    )


def _thinking(
    request: ServiceRequest, text: TextModel, *, is_open: bool, default_budget: int | None
) -> Thinking | None:
    if not text.think_start_tokens or not text.think_end_tokens:
        return None
    budget = default_budget if request.thinking_budget is None else request.thinking_budget
    return Thinking(start=text.think_start_tokens, end=text.think_end_tokens, budget=budget, is_open=is_open)


def without_markup(text: TextModel) -> TextModel:
    """The same tokenizer for text that is given as it is: no thinking, tool calls or channels are looked for."""
    return replace(
        text,
        think_start=None,
        think_end=None,
        tool_start=None,
        tool_end=None,
        parse_tool_call=None,
        calls=ModelCalls(),
        structural_markers=(),
        transitions={},
        initial_state=None,
    )


_SEEDS = 2**63
_NEVER = -1000.0
"""A bias that leaves a token without any chance beside others."""


def job_of(
    request: ServiceRequest,
    answer_format: AnswerFormat,
    prompt: Prompt,
    choice: Choice,
    *,
    max_tokens: int,
    stop_tokens: frozenset[int],
    constraint: Callable[[], Constraint] | None,
    prediction: Tokens | None,
    cache_namespace: str,
    lineage: Lineage = NO_LINEAGE,
) -> Job:
    """The job that makes the answer `choice`. `max_tokens` is 0 for a request that generates nothing."""
    sampling, seed = request.sampling, request.sampling.seed
    if seed is not None:
        # The same seed for every choice would give the same answer n times.
        sampling = replace(sampling, seed=(seed + choice.index) % _SEEDS)
    min_tokens = min(request.min_tokens, max_tokens)
    if request.ignores_eos and not request.stop_tokens:
        min_tokens = max_tokens
    elif request.ignores_eos:
        # The request's own tokens end the answer; the model's are so unlikely that only a grammar can choose them.
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(stop_tokens, _NEVER)})
    return Job(
        id=choice.job_id,
        prompt=prompt,
        purpose=Purpose.GENERATE if request.generates else Purpose.PREFILL,
        prompt_logprobs=request.prompt_logprobs if choice.index == 0 else None,
        namespace=cache_namespace,
        owner=request.namespace,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_tokens=stop_tokens | request.stop_tokens,
        thinking=answer_format.thinking,
        watch=StopWatch(answer_format) if answer_format.stops else None,
        constraint=constraint,
        prediction=prediction,
        chat=request.chat_name,
        lineage=lineage,
        pin_for_s=request.pin_for_s,
        retain_for_s=request.retain_for_s,
    )


def cut_at(prompt: Prompt, kind: BoundaryKind) -> Prompt:
    """The prompt up to its last boundary of this kind."""
    end = max((boundary.position for boundary in prompt.boundaries if boundary.kind is kind), default=0)
    if end == 0:
        raise BadRequest(
            "This chat template cannot render a system prompt alone. Add a user message.", param="messages"
        )
    return prompt.up_to(end)
