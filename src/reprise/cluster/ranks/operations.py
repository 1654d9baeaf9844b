"""Operations: the engine's calls that change layer states, which all ranks run in the same order.

A model that is sharded over several processes (ranks) has its layer states in all of them, and rank 0 takes all
decisions. Everything its loop does to layer states passes through the functions of `_ENGINE`, which `wrap_engine`
replaces: where a recorder is set, each call is sent to it before it runs; the other ranks run the same calls in the
same order (`reprise.cluster.ranks.follower`), each on its own shard. A call within a call is part of it.

Arguments must be plain data or objects that both sides know (`reprise.cluster.ranks.codec`), and the result must
depend on them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Tokens
from reprise.disk.records.record import DiskRecord
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.records import RecordEncoder, RecordSource, RestoringSequence
from reprise.engine.running.runner import Runner
from reprise.engine.states.payloads import PackedSegment
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""All operations by name, as each rank runs them."""

PASSES = frozenset({"Runner._feed", "Runner._advance"})
"""The operations in which ranks wait for each other."""

_ENGINE: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        Runner,
        (
            *("begin", "begin_restore", "begin_move", "restore_part", "stop", "drop", "keep_idle"),
            *("_feed", "_advance", "_undo", "_gather"),
        ),
    ),
    (LiveSequence, ("copy", "copy_out")),
    (SequenceSource, ("copy", "snapshot")),
    (PackedSegment, ("cut", "join")),
    (RecordEncoder, ("new", "add_entries", "add_snapshot")),
    (RecordSource, ("new", "_add", "work", "give_up", "_take", "_take_snapshot")),
    (RestoringSequence, ("new", "work", "_finish", "give_up")),
)


OperationRecorder = Callable[[str, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Runs a function with these arguments here and, by its name, on the other ranks; returns the result here."""

_recorder: ContextVar[OperationRecorder | None] = ContextVar("recorder", default=None)
_runs: ContextVar[bool] = ContextVar("runs", default=False)


def set_recorder(recorder: OperationRecorder | None) -> None:
    """Set the recorder of this thread's operations; None: no recorder."""
    wrap_engine()
    _recorder.set(recorder)


@contextmanager
def one_operation() -> Generator[None]:
    """In this block, operations are part of one operation."""
    before = _runs.set(True)
    try:
        yield
    finally:
        _runs.reset(before)


@cache
def wrap_engine() -> None:
    """Replace the engine's operations by ones that ask the recorder, for all threads of this process."""
    for owner, names in _ENGINE:
        for name in names:
            is_static = isinstance(vars(owner)[name], staticmethod)
            own = getattr(owner, name)
            wrapped = _recorded(f"{owner.__name__}.{name}", own, _ELSEWHERE.get(own, own))
            setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
    setattr(RecordEncoder, "note_queued", _note_queued)  # noqa: B010 (another name for the first parameter)


def _recorded(name: str, alone: Callable[..., Any], as_rank: Callable[..., Any]) -> Callable[..., Any]:
    """`alone` where nothing records, else `as_rank`, on all ranks."""
    assert name not in OPERATIONS, name
    OPERATIONS[name] = as_rank

    @wraps(alone)
    def call(*positional: Any, **named: Any) -> Any:
        recorder = _recorder.get()
        if recorder is None or _runs.get():
            return alone(*positional, **named)
        return recorder(name, as_rank, positional, named)

    return call


# What ranks do in addition: those that wait for each other within a pass have to compute the same of it.

_feed, _advance = Runner._feed, Runner._advance  # pyright: ignore[reportPrivateUsage]


def _feed_now(runner: Runner, rows: SequenceBatch, tokens: npt.NDArray[np.int32], **named: Any) -> mx.array:
    logits = _feed(runner, rows, tokens, **named)
    mx.eval(rows.arrays(), logits)
    return logits


def _advance_now(runner: Runner, rows: SequenceBatch, tokens: npt.NDArray[np.int32]) -> None:
    _advance(runner, rows, tokens)
    mx.eval(rows.arrays())


def _note_queued(encoder: RecordEncoder, record: DiskRecord) -> None:
    """Rank 0 has queued this record for writing: the other ranks queue their parts of it."""
    root, parent = record.root.hex(), record.parent.hex()
    queue_part(encoder, root, parent, record.start, record.tokens, is_tail=record.is_tail)


def _queue_nothing(
    encoder: RecordEncoder, root: str, parent: str, start: int, tokens: Tokens, *, is_tail: bool
) -> None:
    """On rank 0, whose own part is queued; `FollowingRank` has what the others do."""


QUEUE_PART = "queue_part"
queue_part = _recorded(QUEUE_PART, _queue_nothing, _queue_nothing)

_ELSEWHERE: Mapping[Callable[..., Any], Callable[..., Any]] = {_feed: _feed_now, _advance: _advance_now}
