"""Turns a request into the engine's jobs, one per answer."""

from collections.abc import Callable
from dataclasses import replace

from reprise.api.choice import Choice
from reprise.api.exchange import EndReason, ServiceRequest
from reprise.api.reading import Reading
from reprise.api.reply import AnswerJob
from reprise.core.errors import BadRequest
from reprise.core.job import Constraint, Job, Purpose
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Tokens, own_tokens

_SEEDS = 2**63
_NEVER = -1000.0
"""A bias that leaves a token without any chance beside others."""


def running_of(request: ServiceRequest, reading: Reading, index: int) -> AnswerJob:
    """The answer number `index` before its first token."""
    choice = Choice(
        index,
        reading.parser(),
        wants_logprobs=request.sampling.logprobs is not None,
        allows_parallel_calls=request.allows_parallel_calls,
        tells_end=request.prompt_logprobs is not None,
        done_as=EndReason.LENGTH if request.max_tokens == 0 else EndReason.STOP,
    )
    return AnswerJob(job_id=request.id if request.num_choices == 1 else f"{request.id}-{index}", choice=choice)


def job_of(
    request: ServiceRequest,
    reading: Reading,
    prompt: Prompt,
    run: AnswerJob,
    *,
    max_tokens: int,
    stop_tokens: frozenset[int],
    constraint: Callable[[], Constraint] | None,
    prediction: Tokens | None,
    cache_namespace: str,
) -> Job:
    """The job that makes the answer of `run`. `max_tokens` is 0 for a request that generates nothing."""
    sampling, seed = request.sampling, request.sampling.seed
    if seed is not None:
        # The same seed for every choice would give the same answer n times.
        sampling = replace(sampling, seed=(seed + run.choice.index) % _SEEDS)
    min_tokens = min(request.min_tokens, max_tokens)
    if request.ignores_eos and not request.stop_tokens:
        min_tokens = max_tokens
    elif request.ignores_eos:
        # The request's own tokens end the answer; the model's are so unlikely that only a grammar can choose them.
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(stop_tokens, _NEVER)})
    return Job(
        id=run.job_id,
        prompt=prompt,
        purpose=Purpose.GENERATE if request.generates else Purpose.PREFILL,
        prompt_logprobs=request.prompt_logprobs if run.choice.index == 0 else None,
        namespace=cache_namespace,
        owner=request.namespace,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_tokens=stop_tokens | request.stop_tokens,
        thinking=reading.thinking,
        watch=reading.watch(),
        constraint=constraint,
        prediction=prediction,
        chat=request.chat,
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
    boundaries = tuple(boundary for boundary in prompt.boundaries if boundary.position <= end)
    return Prompt(tokens=own_tokens(prompt.tokens[:end]), boundaries=boundaries)
