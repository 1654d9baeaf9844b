"""What jobs ask to keep: stored before what is worth more, found again by its name, and left a shared beginning."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reprise.cache.node import subtree
from reprise.cache.policy import EvictionCandidate, ExpectedSaving
from reprise.core.events import Event, Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Purpose
from reprise.core.pin import pin_id
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.tokens import as_tokens
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine
from tests.loop.test_reuse import words


class _OtherClock:
    """The system's clock, until another one takes its place."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = time.monotonic

    def __call__(self) -> float:
        return self.now_s()


@pytest.fixture
def engines_clock() -> _OtherClock:
    return _OtherClock()


@pytest.fixture(params=["llama", "qwen3_5"])
def engine(request: pytest.FixtureRequest, engines_clock: _OtherClock) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, thread=EngineThread(clock=engines_clock))
    yield engine
    engine.close()


class KeepingPolicy(ExpectedSaving):
    """Evicts nothing for anything new."""

    def admits(self, new: EvictionCandidate, than: EvictionCandidate, *, is_exact: bool) -> bool:
        return False


@pytest.mark.parametrize("asked", [{}, {"retain_for_s": float("inf")}, {"pin_for_s": float("inf")}], ids=str)
def test_what_a_client_wants_kept_is_stored_in_place_of_what_is_worth_more(
    engine: DrivenEngine, asked: dict[str, Any]
) -> None:
    def leave_room_to_run(worker: Worker) -> int:
        worker.cache.order.policy = KeepingPolicy()
        return worker.memory.held + worker.runner.most_live_nbytes(60 + 8, chunk=60)

    engine.run(words(989, 60), boundaries=[Boundary(30, BoundaryKind.EXPLICIT)])
    engine.loop.set_budget(engine.ask(leave_room_to_run))
    engine.run(words(990, 60), boundaries=[Boundary(30, BoundaryKind.EXPLICIT)], **asked)
    again = engine.run([*words(990, 60)[:30], 5, 6])
    assert (again.end.outcome.num_reused == 30) == (len(asked) > 0)


def test_a_pin_is_found_by_the_tokens_that_it_keeps(engine: DrivenEngine) -> None:
    prompt = words(991, 60)
    at = [Boundary(40, BoundaryKind.EXPLICIT), Boundary(55, BoundaryKind.STABLE)]
    engine.run(prompt, boundaries=at, pin_for_s=float("inf"), retain_for_s=float("inf"))
    pins = engine.loop.pins("").result(120)
    assert [(pin.num_tokens, pin.expires_in_s, pin.follows_chat) for pin in pins.pins] == [
        (40, None, False),
        (55, None, True),
    ]
    assert [pin.id for pin in pins.pins] == [pin_id(as_tokens(prompt[:end])) for end in (40, 55)]
    # The longer path holds the shorter one: together they keep less than each by itself.
    assert max(pin.nbytes for pin in pins.pins) <= pins.nbytes <= sum(pin.nbytes for pin in pins.pins)
    assert engine.loop.pins("another").result(120).pins == ()
    assert not engine.loop.unpin(pins.pins[0].id, namespace="another").result(120)
    assert engine.loop.unpin(pins.pins[0].id, namespace="").result(120)
    assert [pin.num_tokens for pin in engine.loop.pins("").result(120).pins] == [55]


def test_how_long_a_pin_lasts_is_counted_from_now(engine: DrivenEngine, engines_clock: _OtherClock) -> None:
    prompt = words(993, 60)
    engine.run(prompt, boundaries=[Boundary(40, BoundaryKind.EXPLICIT)], pin_for_s=5000)
    # Nothing happens for a while: no step is done, and nobody looks at the clock.
    later = time.monotonic() + 3000
    engines_clock.now_s = lambda: later
    (pin,) = engine.loop.pins("").result(120).pins
    assert pin.expires_in_s is not None and pin.expires_in_s <= 2000


class _SteppedClock:
    """Stands still but for what is added to it; at whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.now_s = float(round(time.monotonic()))

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(engines_clock: _OtherClock, monkeypatch: pytest.MonkeyPatch) -> _SteppedClock:
    """A clock on which the first pass over any prompt takes 1,000 seconds, and nothing else any time."""
    clock = _SteppedClock()
    engines_clock.now_s = clock

    def slow_down(lives: Any) -> None:
        clock.now_s += 1000 if lives[0].position == 0 else 0

    monkeypatch.setitem(ACTIONS, Failpoint.PREFILL, slow_down)
    return clock


def test_the_time_of_a_pin_begins_when_its_prefix_is_there(engine: DrivenEngine, clock: _SteppedClock) -> None:
    prompt = words(994, 60)
    mark = [Boundary(60, BoundaryKind.EXPLICIT)]
    made = engine.run(prompt, boundaries=mark, purpose=Purpose.PREFILL, pin_for_s=500).end.outcome.pin
    assert made is not None
    assert (made.id, made.num_tokens, made.expires_in_s) == (pin_id(as_tokens(prompt)), 60, 500)
    assert engine.loop.pins("").result(120).pins == (made,)
    clock.now_s += 200
    again = engine.run(prompt, boundaries=mark, purpose=Purpose.PREFILL, pin_for_s=100).end.outcome.pin
    assert again is not None and again.expires_in_s == 300, "asked for again, it does not end sooner"
    clock.now_s += 400
    assert engine.loop.pins("").result(120).pins == ()
    assert engine.run(prompt, purpose=Purpose.PREFILL).end.outcome.pin is None


def test_the_time_of_a_pin_goes_on_while_its_own_request_does(engine: DrivenEngine, clock: _SteppedClock) -> None:
    def take_time(event: Event) -> None:
        clock.now_s += 10 if isinstance(event, Sampled) else 0

    marks = [Boundary(40, BoundaryKind.EXPLICIT), Boundary(55, BoundaryKind.STABLE)]
    kept = {"boundaries": marks, "pin_for_s": 500, "retain_for_s": 500}
    engine.run(words(995, 60), num=8, on_event=take_time, **kept)
    # Where every position is resumable, nothing is stored before the answer has ended.
    is_stored_late = engine.ask(lambda worker: worker.cache.layout.resumes_anywhere)
    left_s = 500 if is_stored_late else 500 - 8 * 10
    pins = engine.loop.pins("").result(120).pins
    assert [(pin.num_tokens, pin.expires_in_s) for pin in pins] == [(40, left_s), (55, left_s)]


def test_a_prompt_without_boundaries_is_retained_as_far_as_it_was_computed_first(engine: DrivenEngine) -> None:
    engine.run(words(992, 60), retain_for_s=float("inf"))
    assert [pin.num_tokens for pin in engine.loop.pins("").result(120).pins] == [59]


def test_a_shared_beginning_that_was_computed_ahead_is_not_superseded_by_the_first_chat() -> None:
    engine = DrivenEngine("qwen3_5")
    try:
        head = words(993, 50)
        engine.run(head, boundaries=[Boundary(50, BoundaryKind.SYSTEM)], purpose=Purpose.PREFILL)
        chat = [*head, *words(994, 30)]
        engine.run(chat, boundaries=[Boundary(50, BoundaryKind.SYSTEM), Boundary(75, BoundaryKind.STABLE)])

        def at_head(worker) -> list[tuple[BoundaryKind, bool]]:
            nodes = [node for root in worker.cache.tree.roots.values() for node in subtree(root)]
            return [(m.kind, m.is_superseded) for n in nodes for m in n.checkpoints.values() if m.position == 50]

        assert engine.ask(at_head) == [(BoundaryKind.SYSTEM, False)]
    finally:
        engine.close()
