"""Fills the records of `reprise.core.inspection` on the engine thread. Changes nothing."""

from __future__ import annotations

from collections import Counter

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.backend import Counts, Held, Lookup, Status, disk_of
from reprise.core.inspection import (
    InspectedEviction,
    InspectedMemory,
    InspectedRequest,
    InspectedSequence,
    Inspection,
    OnDisk,
    PhaseName,
    TreePart,
)
from reprise.core.job import Job
from reprise.core.prompt import Prompt
from reprise.disk.store.cache import DiskCache
from reprise.engine import memory as device_memory
from reprise.engine.running.live_sequence import LiveSequence
from reprise.loop.requests import Decoding, Ended, Prefilling, RunningRequest, Waiting
from reprise.loop.tree_inspection import inspect_tree
from reprise.loop.worker import Worker
from reprise.memory import Account
from reprise.schedule.state import queue_wait_s


def status_of(worker: Worker) -> Status:
    """The status, except for the disk, which changes while the loop sleeps."""
    memory, pinned, stats = worker.memory, worker.cache.pins.total(), worker.cache.stats
    requests = worker.requests
    phases = Counter(type(request.phase) for request in requests.values())
    return Status(
        is_idle=len(requests) == len(worker.embedding) == 0,
        num_waiting=phases[Waiting],
        num_prefilling=phases[Prefilling] + len(worker.embedding),
        num_decoding=phases[Decoding],
        counts=Counts(**requests.counts, saved_s=requests.saved_s, num_evictions=stats.num_evictions),
        num_ahead=requests.num_ahead,
        audit=worker.audit.totals,
        held=Held(
            budget_nbytes=memory.budget if memory.budget is not None else 0,
            kv_nbytes=stats.kv_nbytes,
            snapshot_nbytes=stats.snapshot_nbytes,
            live_nbytes=memory.nbytes(Account.SEQUENCES),
            most_live_nbytes=memory.most_nbytes(Account.SEQUENCES),
            logits_nbytes=memory.nbytes(Account.LOGITS),
            pinned_nbytes=pinned.nbytes,
            num_pins=pinned.num,
            num_tokens=stats.num_tokens,
            index_nbytes=4 * stats.num_tokens + 512 * stats.num_nodes,
            evicted_by_reason=stats.evictions,
        ),
        drafts=None if worker.drafts is None else worker.drafts.status(),
        drafting=worker.drafting,
    )


def lookup(worker: Worker, prompt: Prompt, *, namespace: str) -> Lookup:
    """What this prompt would reuse if it arrived now. Changes nothing. O(length of the match)."""
    job = Job(id="lookup", prompt=prompt, namespace=namespace, max_tokens=1)
    asked = RunningRequest(job=job, sink=lambda event: None, arrived_s=0.0)
    worker.prefixes.match(asked)
    held, speed = asked.position, worker.executor.speed
    on_disk = worker.disk.would_read_to(asked, held=held)
    resume_at, num_loaded = max(held, on_disk), max(0, on_disk - held)
    others = [request for request in worker.requests.values() if not request.is_settle]
    queue_s = queue_wait_s(
        num_running=sum(request.is_running for request in others),
        num_waiting=sum(request.is_waiting for request in others),
        num_left=sum(max(0, r.end - r.position) for r in others if not isinstance(r.phase, Decoding)),
        limits=worker.limits,
        speed=speed,
    )
    # Until the disk's speed was measured, assume the speed of prefill.
    load_speed = speed.load_tokens_per_s
    return Lookup(
        num_prompt=len(prompt),
        num_matched=max(asked.stats.matched, on_disk),
        resume_at=resume_at,
        num_loaded=num_loaded,
        queue_s=queue_s,
        load_s=speed.prefill_s(held, resume_at) if load_speed is None else num_loaded / load_speed,
        prefill_s=speed.prefill_s(resume_at, len(prompt)) + (0 if held == len(prompt) else speed.decode_s),
    )


def stats_of(disk: DiskCache | None) -> OnDisk | None:
    """What a disk cache holds; None: there is none. Thread-safe."""
    return None if disk is None else disk_of([disk.stats()])


def inspect(
    worker: Worker, *, max_nodes: int, part: TreePart, num_inside: int, weights_nbytes: int, now_s: float
) -> Inspection:
    """What is there now, with the `max_nodes` nodes of a part of the tree that were used last. O(those).

    `weights_nbytes`: of the model's weights, 0 while they are not here.
    """
    requests = worker.requests.values()
    return Inspection(
        requests=tuple(_inspect_request(request, now_s=now_s) for request in requests),
        num_inside=num_inside,
        idle=tuple(
            InspectedSequence(position=live.position, nbytes=_nbytes(live), shared_nbytes=live.shared_nbytes)
            for live in worker.sequences.idle
        ),
        num_sequences=worker.runner.num_sequences,
        tree=inspect_tree(worker.cache, worker.disk.cache, requests, max_nodes=max_nodes, now_s=now_s, part=part),
        memory=_inspect_memory(worker, weights_nbytes=weights_nbytes),
        disk=stats_of(worker.disk.cache),
        reads=worker.disk.reads(),
        num_unwritten=worker.disk.num_unwritten,
    )


def _inspect_request(request: RunningRequest, *, now_s: float) -> InspectedRequest:
    admission, outcome = request.stats.admission, request.outcome(now_s)
    return InspectedRequest(
        id=request.id,
        namespace=request.namespace,
        owner=request.job.owner,
        chat=request.job.chat,
        purpose=request.job.purpose,
        phase=_phase(request),
        is_auxiliary=request.is_auxiliary,
        num_prompt=outcome.num_prompt,
        num_matched=outcome.num_matched,
        num_reused=admission.num_reused if admission is not None else None,
        num_loaded=outcome.num_loaded,
        num_computed=outcome.num_prefilled + outcome.num_generated,
        num_generated=outcome.num_generated,
        position=request.position,
        num_stored=request.stored,
        decode_group=request.phase.group if isinstance(request.phase, Decoding) else None,
        nbytes=_nbytes(request.live) if request.live is not None else 0,
        age_s=outcome.total_s,
        queued_s=outcome.queued_s,
        ttft_s=outcome.ttft_s,
    )


def _phase(request: RunningRequest) -> PhaseName:
    match request.phase:
        case Waiting():
            return PhaseName.LOADING if request.is_loading else PhaseName.WAITING
        case Prefilling():
            return PhaseName.PREFILLING
        case Decoding():
            return PhaseName.DECODING
        case Ended():
            raise AssertionError(f"{request.id} has ended, and is among the requests")


def _nbytes(live: LiveSequence) -> int:
    return live.rows.nbytes // live.rows.num_rows


def _inspect_memory(worker: Worker, *, weights_nbytes: int) -> InspectedMemory:
    """What the model holds."""
    footprint, held = worker.runner.footprint, worker.memory.nbytes
    return InspectedMemory(
        token_nbytes=footprint.full,
        snapshot_nbytes=footprint.snapshot,
        budget_nbytes=worker.memory.budget,
        weights_nbytes=weights_nbytes,
        kv_nbytes=held(Account.KV),
        checkpoint_nbytes=held(Account.SNAPSHOTS),
        logits_nbytes=held(Account.LOGITS),
        live_nbytes=held(Account.SEQUENCES),
        most_live_nbytes=worker.memory.most_nbytes(Account.SEQUENCES),
        incoming_nbytes=held(Account.INCOMING),
        images_nbytes=held(Account.IMAGES),
        embeddings_nbytes=held(Account.EMBEDDINGS),
        device_nbytes=device_memory.used_nbytes(),
        pool_nbytes=device_memory.pool_nbytes(),
        process_nbytes=device_memory.process_nbytes(),
    )


def inspect_evictions(cache: PrefixCache, *, nbytes: int, most: int, now_s: float) -> tuple[InspectedEviction, ...]:
    """The next items to be evicted, in order, until `nbytes` are freed, at most `most`. Changes nothing.

    Each item is evaluated in the current tree, without the effects of evicting those before it.
    """
    found: list[InspectedEviction] = []
    freed = 0
    for checkpoint, candidate in cache.would_evict(most):
        if freed >= nbytes:
            break
        freed += candidate.nbytes
        found.append(
            InspectedEviction(
                node=checkpoint.node.serial,
                namespace=cache.tree.namespace_of(checkpoint.node),
                position=checkpoint.position,
                kind=checkpoint.kind,
                nbytes=candidate.nbytes,
                num_cost=candidate.cost,
                age_s=max(0.0, now_s - checkpoint.node.used_at_s),
            )
        )
    return tuple(found)
