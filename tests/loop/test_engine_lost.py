"""The engine thread dies in any of its phases: whoever waits gets an error, and so does whoever comes later."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from reprise.core.errors import EngineFailed, EngineLost, LoadFailed
from reprise.core.events import Event, Finished, FinishReason, Sampled
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from tests.loop.driving import PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.restarts import words
from tests.loop.several import OneOfSeveral, serving


class Fault(BaseException):
    """What no `except Exception` catches."""


class Faults:
    """Raises in the next call of a function, by its qualified name, on a thread that was started meanwhile."""

    def __init__(self) -> None:
        self.place = ""
        self.error: BaseException = Fault("planted")

    def trace(self, frame: FrameType, event: str, arg: object) -> None:
        if self.place and frame.f_code.co_qualname == self.place:
            self.place = ""
            raise self.error


@contextmanager
def faults() -> Generator[Faults]:
    planted = Faults()
    threading.settrace(planted.trace)
    try:
        yield planted
    finally:
        threading.settrace(None)  # pyright: ignore[reportArgumentType]


def _stream(model: DrivenEngine) -> SubmittedJob:
    return model.submit(words(1, 40), num=100_000).wait_for(Sampled)


def _questions(model: DrivenEngine) -> list[Future[Any]]:
    loop, prompt = model.loop, Prompt(tokens=as_tokens(words(2, 9)))
    return [loop.inspect(), loop.clear(), loop.pins(""), loop.lookup(prompt, namespace=""), loop.next_evictions(1)]


def _check_lost(models: list[OneOfSeveral], streams: list[SubmittedJob], answers: list[Future[Any]]) -> None:
    for stream in streams:
        assert stream.wait().end.reason is FinishReason.FAILED and isinstance(stream.end.error, EngineLost)
        assert sum(type(event) is type(stream.end) for event in stream.events) == 1
    for answer in answers:
        # What was asked before may have been answered.
        assert isinstance(answer.exception(PATIENCE_S), EngineLost | None)
    for model in models:
        assert model.loop.status().has_died
        for later in (*_questions(model), model.loop.ready(), model.loop.preload(), model.loop.dismiss()):
            assert isinstance(later.exception(PATIENCE_S), EngineLost)
    with pytest.raises(EngineLost, match="started again"):
        models[0].submit(words(3, 9))
    assert EngineLost.status == 503


def _load(models: list[OneOfSeveral]) -> list[Future[Any]]:
    return [models[1].loop.ready()]


def _unload(models: list[OneOfSeveral]) -> list[Future[Any]]:
    return [models[1].loop.dismiss()]


def _ask(models: list[OneOfSeveral]) -> list[Future[Any]]:
    return _questions(models[0])


def _submit(models: list[OneOfSeveral]) -> list[Future[Any]]:
    models[0].submit(words(4, 9))
    return []


def _submit_to_unloaded(models: list[OneOfSeveral]) -> list[Future[Any]]:
    """A job that no worker has: its model is not loaded."""
    ended: Future[Any] = Future()

    def note(event: Event) -> None:
        if isinstance(event, Finished):
            ended.set_exception(event.error)

    models[1].submit(words(4, 9), on_event=note)
    return [ended]


PHASES: list[tuple[str, Callable[[list[OneOfSeveral]], list[Future[Any]]]]] = [
    ("EngineThread._receive", _ask),
    ("EngineThread._decide", _ask),
    ("ModelEngine.state", _ask),
    ("EngineThread.note_progress", _ask),
    ("EngineThread._load_in_background", _load),
    ("EngineThread._take", _load),
    ("ModelEngine.take_weights", _load),
    ("EngineThread._unload", _unload),
    ("Worker.unload", _unload),
    ("InspectionQueue.answer", _ask),
    ("inspect", _ask),
    ("Worker.clear_cache", _ask),
    ("ModelEngine.arrive", _submit),
    ("Worker.arrive", _submit),
    ("RunningRequest.outcome", _submit_to_unloaded),
    ("Worker.step", _ask),
    ("Worker._after_tokens", _ask),
]


@pytest.mark.parametrize(("place", "act"), PHASES, ids=[place for place, _ in PHASES])
def test_whoever_waits_gets_an_error_in_whatever_phase_it_dies(
    place: str, act: Callable[[list[OneOfSeveral]], list[Future[Any]]]
) -> None:
    with faults() as planted, serving("llama", "llama:2") as models:
        stream = _stream(models[0])
        if act is _unload:
            models[1].ready()
        planted.place = place
        answers = act(models)
        _check_lost(models, [stream], answers)


@pytest.mark.parametrize("place", ["EngineThread._decide", "EngineThread._take", "EngineThread.note_progress"])
def test_an_exception_outside_of_requests_ends_it_too(place: str) -> None:
    with faults() as planted, serving("llama", "llama:2") as models:
        stream = _stream(models[0])
        planted.place, planted.error = place, RuntimeError("planted")
        _check_lost(models, [stream], _load(models))


def test_weights_that_a_thread_did_not_read_keep_nobody_waiting() -> None:
    with faults() as planted, serving("llama", "llama:2") as models:
        planted.place = "ModelEngine.read_weights"
        assert isinstance(models[1].loop.ready().exception(PATIENCE_S), LoadFailed)
        assert models[0].run(words(5, 9)).end.error is None
        assert models[1].ready().run(words(5, 9)).end.error is None


def test_the_first_load_dies() -> None:
    with faults() as planted:
        planted.place = "EngineThread._load_first"
        with pytest.raises(EngineLost, match="in the program: planted"):
            DrivenEngine("llama")


@pytest.mark.parametrize("place", ["RequestTable.release", "Worker.arrive"])
def test_an_exception_where_a_request_begins_or_ends_is_its_own(place: str) -> None:
    with faults() as planted:
        engine = DrivenEngine("llama")
        planted.place, planted.error = place, RuntimeError("planted")
        ended = engine.submit(words(6, 9)).wait().end
        assert ended.error is None or isinstance(ended.error, EngineFailed)
        assert engine.run(words(6, 9)).end.error is None
        engine.close()


def test_one_that_hangs_is_given_up_from_another_thread() -> None:
    engine, hold = DrivenEngine("llama"), threading.Event()

    def hang(worker: object) -> None:
        hold.wait(PATIENCE_S)

    engine.loop.call(hang)
    waiting, asked = engine.submit(words(7, 9)), engine.loop.inspect()
    engine.loop.give_up(EngineLost("It hangs."), within_s=0.05)
    assert isinstance(waiting.wait().end.error, EngineLost) and isinstance(asked.exception(0), EngineLost)
    assert engine.loop.status().has_died
    hold.set()
    engine.close()
