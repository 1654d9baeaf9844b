"""Builds the scheduler's input: the limits, and the state of all requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from reprise.core.images import PromptImage
from reprise.core.kinds import Layout
from reprise.core.pass_price import SMALLEST_CHUNK, PassPrice
from reprise.core.settings import Settings
from reprise.engine.running.batching import TOKEN_BY_TOKEN
from reprise.engine.running.image_features import FeatureCache
from reprise.engine.running.runner import Runner
from reprise.loop.requests import Decoding, Prefilling, RunningRequest, Waiting
from reprise.loop.sequences import SequencePool
from reprise.schedule.state import (
    LAST_SLICE,
    DecodingJob,
    PrefillingJob,
    SchedulerLimits,
    SchedulerState,
    Speed,
    WaitingJob,
)

_WHOLE_FROM = 8
"""Below this many tokens, a recurrent state may have another shape (the last tokens of an n-gram), so it is not
batched."""


def scheduler_limits(runner: Runner, settings: Settings) -> SchedulerLimits:
    """The limits of this model under these settings."""
    loaded = runner.loaded
    chunk = 1 if loaded.architecture in TOKEN_BY_TOKEN else settings.prefill_chunk
    return SchedulerLimits(
        max_batch=settings.max_batch,
        max_queue=settings.max_queue,
        prefill_chunk=chunk,
        min_chunk=min(SMALLEST_CHUNK, chunk),
        max_stall_s=settings.max_stall_ms / 1000,
        can_batch=runner.can_batch,
        resumes_anywhere=loaded.blueprint.layout.resumes_anywhere,
        whole_images=loaded.blueprint.whole_images,
        last_slice=min(LAST_SLICE, chunk),
    )


def scheduler_state(
    requests: Iterable[RunningRequest],
    sequences: SequencePool,
    speed: Speed,
    layout: Layout,
    *,
    now_s: float,
    price: PassPrice,
) -> SchedulerState:
    """The state of all requests, for `reprise.schedule.decide`."""
    waiting: list[WaitingJob] = []
    prefilling: list[PrefillingJob] = []
    decoding: list[DecodingJob] = []
    running: list[RunningRequest] = []
    for request in requests:
        match request.phase:
            case Waiting() as phase:
                waiting.append(_waiting(request, phase, sequences))
                continue
            case Prefilling() as phase:
                prefilling.append(_prefilling(request, phase, layout, sequences.runner.features))
            case Decoding() as phase:
                decoding.append(_decoding(request, phase, layout))
            case _:
                continue
        running.append(request)
    # Where requests only decode, nobody asks.
    has_prefill = len(waiting) + len(prefilling) > 0
    return SchedulerState(
        now_s=now_s,
        waiting=tuple(waiting),
        prefilling=tuple(prefilling),
        decoding=tuple(decoding),
        speed=speed,
        free_nbytes=sequences.available(running) if has_prefill else None,
        unused_nbytes=sequences.unused(running) if has_prefill else None,
        price=price,
        kept_for_passes=sequences.memory.kept_for_passes,
    )


def _waiting(request: RunningRequest, phase: Waiting, sequences: SequencePool) -> WaitingJob:
    num_prompt, resume_at = len(request.prompt), phase.resume_at
    return WaitingJob(
        id=request.id,
        arrived_s=request.arrived_s,
        prompt_len=num_prompt,
        resume_at=min(resume_at, num_prompt - 1),
        common_prefix_lengths=request.common_prefix_lengths,
        live_nbytes=sequences.estimate_to_admit(num_prompt, resume_at, images=request.prompt.images),
        tower_nbytes=_tower_nbytes(request, sequences.runner.features),
        spans=request.prompt.spans,
        preempted_beside=phase.preempted_beside,
        is_auxiliary=request.is_auxiliary,
        is_settle=request.is_settle,
        beside=request.job.beside,
    )


def unseen_images(request: RunningRequest, features: FeatureCache) -> list[PromptImage]:
    """The images that the tower has to run for before they are prefilled, in order."""
    return [
        each for each in request.prompt.images if each.span.stop > request.position and not features.has(each.image)
    ]


def _tower_nbytes(request: RunningRequest, features: FeatureCache) -> int:
    return max((features.tower_nbytes(len(each.span)) for each in unseen_images(request, features)), default=0)


def _prefilling(request: RunningRequest, phase: Prefilling, layout: Layout, features: FeatureCache) -> PrefillingJob:
    return PrefillingJob(
        id=request.id,
        arrived_s=request.arrived_s,
        # If everything is reused nothing is left to compute, but it cannot decode before it is restored.
        position=min(request.position, request.end - 1) if request.is_restoring else request.position,
        end=request.end,
        checkpoints=phase.plan.positions,
        stored=request.stored,
        common_prefix_lengths=request.common_prefix_lengths,
        spans=request.prompt.spans,
        unseen=tuple(each.span for each in unseen_images(request, features)),
        tower_nbytes=_tower_nbytes(request, features),
        can_batch=_can_batch(request.position, layout),
        is_auxiliary=request.is_auxiliary,
        is_settle=request.is_settle,
        beside=request.job.beside,
        is_restoring=request.is_restoring,
        may_sample=request.may_sample_at_once,
    )


def _decoding(request: RunningRequest, phase: Decoding, layout: Layout) -> DecodingJob:
    position = phase.live.position
    return DecodingJob(
        id=request.id,
        length=position,
        group=phase.group,
        stored=request.stored,
        common_prefix_lengths=request.common_prefix_lengths,
        can_batch=_can_batch(position, layout),
    )


def _can_batch(position: int, layout: Layout) -> bool:
    """Whether a sequence at `position` can be batched with others."""
    return position == 0 or position >= _WHOLE_FROM or not layout.has_snapshots
