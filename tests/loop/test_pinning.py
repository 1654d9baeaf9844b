"""What jobs ask to keep: stored before what is worth more, found again by its name, and left a shared beginning."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from reprise.cache.tree import subtree
from reprise.core.backend import pin_id
from reprise.core.job import Purpose
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.tokens import as_tokens
from tests.loop.driving import Engine
from tests.loop.test_reuse import words


@pytest.fixture(params=["llama", "qwen3_5"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.close()


@pytest.mark.parametrize("asked", [{}, {"retain_until": float("inf")}, {"pin_until": float("inf")}], ids=str)
def test_the_cache_is_told_what_a_client_wants_kept(engine: Engine, asked: dict[str, Any]) -> None:
    wanted: list[bool] = []

    def watch(worker) -> None:
        commit = worker.cache.commit

        def noted(*given: Any, is_wanted: bool = False, **options: Any) -> Any:
            wanted.append(is_wanted)
            return commit(*given, is_wanted=is_wanted, **options)

        worker.cache.commit = noted

    engine.ask(watch)
    engine.run(words(990, 60), boundaries=[Boundary(30, BoundaryKind.EXPLICIT)], **asked)
    assert set(wanted) == {len(asked) > 0}


def test_a_pin_is_found_by_the_tokens_that_it_keeps(engine: Engine) -> None:
    prompt = words(991, 60)
    at = [Boundary(40, BoundaryKind.EXPLICIT), Boundary(55, BoundaryKind.STABLE)]
    engine.run(prompt, boundaries=at, pin_until=float("inf"), retain_until=float("inf"))
    pins = engine.loop.pins("").result(30)
    assert [(pin.tokens, pin.expires_in_s, pin.follows_chat) for pin in pins.pins] == [
        (40, None, False),
        (55, None, True),
    ]
    assert [pin.id for pin in pins.pins] == [pin_id(as_tokens(prompt[:end])) for end in (40, 55)]
    # The longer path holds the shorter one: together they keep less than each by itself.
    assert max(pin.nbytes for pin in pins.pins) <= pins.nbytes <= sum(pin.nbytes for pin in pins.pins)
    assert engine.loop.pins("another").result(30).pins == ()
    assert not engine.loop.unpin(pins.pins[0].id, namespace="another").result(30)
    assert engine.loop.unpin(pins.pins[0].id, namespace="").result(30)
    assert [pin.tokens for pin in engine.loop.pins("").result(30).pins] == [55]


def test_how_long_a_pin_lasts_is_counted_from_now(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = words(993, 60)
    engine.run(prompt, boundaries=[Boundary(40, BoundaryKind.EXPLICIT)], pin_until=time.monotonic() + 5000)
    # Nothing happens for a while: no step is done, and nobody looks at the clock.
    later = time.monotonic() + 3000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    (pin,) = engine.loop.pins("").result(30).pins
    assert pin.expires_in_s is not None and pin.expires_in_s <= 2000


def test_a_prompt_without_boundaries_is_retained_as_far_as_it_was_computed_first(engine: Engine) -> None:
    engine.run(words(992, 60), retain_until=float("inf"))
    assert [pin.tokens for pin in engine.loop.pins("").result(30).pins] == [59]


def test_a_shared_beginning_that_was_computed_ahead_is_not_superseded_by_the_first_chat() -> None:
    engine = Engine("qwen3_5")
    try:
        head = words(993, 50)
        engine.run(head, boundaries=[Boundary(50, BoundaryKind.SYSTEM)], purpose=Purpose.PREFILL)
        chat = [*head, *words(994, 30)]
        engine.run(chat, boundaries=[Boundary(50, BoundaryKind.SYSTEM), Boundary(75, BoundaryKind.STABLE)])

        def at_head(worker) -> list[tuple[BoundaryKind, bool]]:
            nodes = [node for root in worker.cache.roots.values() for node in subtree(root)]
            return [(m.kind, m.is_superseded) for n in nodes for m in n.landmarks.values() if m.position == 50]

        assert engine.ask(at_head) == [(BoundaryKind.SYSTEM, False)]
    finally:
        engine.close()
