"""Operations: the engine calls that change layer states, which all ranks run in the same order.

A model that is sharded over several processes (ranks) has its layer states in all of them, and rank 0 takes all
decisions. Everything its loop does to layer states goes through a few functions, marked with `on_all_ranks`. If a
recorder is set, each call is sent to it before it runs; the other ranks run the same calls in the same order
(`reprise.engine.follower`), each on its own shard. Marked functions called by a marked function are part of its call.

Arguments must be plain data or objects that both sides know (`reprise.engine.operation_codec`), and the result must
depend on them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""All marked functions by name."""


class OperationRecorder(Protocol):
    """Receives the calls of marked functions."""

    def run(self, name: str, function: Callable[..., T], positional: Sequence[Any], named: Mapping[str, Any]) -> T:
        """Run the function here and, by its name, on the other ranks; returns the result here."""
        ...


_recorder: ContextVar[OperationRecorder | None] = ContextVar("recorder", default=None)
_runs: ContextVar[bool] = ContextVar("runs", default=False)


def on_all_ranks(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Mark a function that every rank must call."""
    name = function.__qualname__
    assert name not in OPERATIONS, name

    @wraps(function)
    def call(first: S, /, *positional: P.args, **named: P.kwargs) -> T:
        recorder = _recorder.get()
        if recorder is None or _runs.get():
            return function(first, *positional, **named)
        return recorder.run(name, function, (first, *positional), named)

    OPERATIONS[name] = function
    return call


def set_recorder(recorder: OperationRecorder | None) -> None:
    """Set the recorder of this thread's operations; None: no recorder."""
    _recorder.set(recorder)


def is_recorded() -> bool:
    """Whether other ranks run this thread's operations too."""
    return _recorder.get() is not None


@contextmanager
def one_operation() -> Generator[None]:
    """In this block, marked functions are part of one operation."""
    before = _runs.set(True)
    try:
        yield
    finally:
        _runs.reset(before)


def is_shared() -> bool:
    """Whether an operation on several ranks is running: passes must then be evaluated before they return."""
    return _runs.get()
