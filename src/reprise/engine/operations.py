"""What the ranks of a group do alike: the calls of the engine that touch layer states, recorded by rank 0.

A model that is sharded over several processes (ranks) has its layer states in all of them. Rank 0 alone decides. What
its loop asks of the engine comes down to a few functions, which are marked here with `on_all_ranks`. Where a recorder
is set, each call of one is told to it first, and then runs; the other ranks run the same calls in the same order
(`reprise.engine.follower`), each on its own shard. A marked function that another one calls is a part of that call.

What it was called with must be plain data and objects that both sides know (`reprise.engine.operation_codec`), and what
it does must follow from these alone.
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
"""All marked functions, by name: what a rank may be asked to run."""


class OperationRecorder(Protocol):
    """Who is told what runs."""

    def run(self, name: str, function: Callable[..., T], positional: Sequence[Any], named: Mapping[str, Any]) -> T:
        """Have the other ranks call the function of this name too, and give what it gives here."""
        ...


_recorder: ContextVar[OperationRecorder | None] = ContextVar("recorder", default=None)
_runs: ContextVar[bool] = ContextVar("runs", default=False)


def on_all_ranks(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Mark a function whose calls every rank is to make."""
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
    """Have a recorder told of all that this thread runs from now on; None: nobody."""
    _recorder.set(recorder)


def is_recorded() -> bool:
    """Whether other ranks run what this thread runs."""
    return _recorder.get() is not None


@contextmanager
def one_operation() -> Generator[None]:
    """Within it, marked functions are parts of one call."""
    before = _runs.set(True)
    try:
        yield
    finally:
        _runs.reset(before)


def is_shared() -> bool:
    """Whether this runs on several ranks: then what a pass computes is computed before it returns."""
    return _runs.get()
