"""Pins stay under pressure, end with their time, follow a conversation, and give way only when asked to."""

import pytest

from reprise.cache import pins
from reprise.core.kinds import Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import as_tokens
from tests.cache.hash_model import SNAPSHOT_NBYTES
from tests.cache.strategies import EXAMPLES
from tests.cache.trial import Trial

CHAT = tuple(range(1, 41))


def by_name(layout: Layout) -> str:
    return str(layout)


def _trial(layout: Layout) -> Trial:
    trial = Trial(layout)
    for at in (10, 20, 30, 40):
        trial.commit(CHAT[:at])
    return trial


def _evict_all(trial: Trial) -> int:
    """Evict whatever may go; gives how far the chat still reaches."""
    while trial.cache.evict_one("test"):
        trial.cache.check()
    return trial.request(CHAT, is_held=False, limit=len(CHAT))


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_position_that_is_stored_can_be_pinned_and_let_go(layout: Layout) -> None:
    trial = _trial(layout)
    assert pins.pin(trial.cache, as_tokens(CHAT[:20]), namespace="", until=5.0)
    trial.cache.check()
    assert _evict_all(trial) == 20
    held = trial.cache.ledger.held
    assert pins.kept(trial.cache) == pins.Kept(num=1, nbytes=held, until=5.0)
    (mark,) = pins.pinned(trial.cache)
    assert tuple(pins.tokens_of(mark)) == CHAT[:20]
    assert pins.unpin(trial.cache, mark)
    assert not pins.unpin(trial.cache, mark)
    trial.cache.check()
    assert _evict_all(trial) == 0
    assert pins.kept(trial.cache) == pins.Kept()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_what_cannot_be_resumed_cannot_be_pinned(layout: Layout) -> None:
    trial = _trial(layout)
    other = (*CHAT[:20], 99)
    assert not pins.pin(trial.cache, as_tokens(other), namespace="", until=5.0)
    assert not pins.pin(trial.cache, as_tokens(CHAT[:20]), namespace="another", until=5.0)
    assert not pins.pin(trial.cache, as_tokens(()), namespace="", until=5.0)
    if layout.has_snapshots:
        assert not pins.pin(trial.cache, as_tokens(CHAT[:21]), namespace="", until=5.0)
    trial.cache.check()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_later_turn_retains_in_the_place_of_an_earlier_one(layout: Layout) -> None:
    trial = _trial(layout)
    assert pins.pin(trial.cache, as_tokens(CHAT[:10]), namespace="", until=5.0)
    for at in (20, 30):
        assert pins.retain(trial.cache, as_tokens(CHAT[:at]), namespace="", until=5.0)
    # The pin that was set by itself is no turn of the conversation, and stays.
    assert pins.kept(trial.cache).num == 2
    assert _evict_all(trial) == 30
    if layout.has_snapshots:
        assert trial.cache.ledger.snapshots == 2 * SNAPSHOT_NBYTES
    trial.cache.now_s = 5.0
    assert _evict_all(trial) == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_the_pin_that_ends_first_is_lifted_first(layout: Layout) -> None:
    trial = _trial(layout)
    pins.pin(trial.cache, as_tokens(CHAT[:20]), namespace="", until=9.0)
    pins.pin(trial.cache, as_tokens(CHAT[:30]), namespace="", until=5.0)
    assert pins.lift_one(trial.cache)
    assert _evict_all(trial) == 20
    assert pins.lift_one(trial.cache)
    assert not pins.lift_one(trial.cache)
    assert _evict_all(trial) == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_of_too_many_pins_those_that_end_first_go_and_then_the_newest(layout: Layout) -> None:
    trial = Trial(layout)
    forever, soon, later = ((n, *range(1, 20)) for n in (100, 101, 102))
    for tokens, until in ((forever, float("inf")), (soon, 5.0), (later, float("inf"))):
        trial.commit(tokens)
        pins.pin(trial.cache, as_tokens(tokens), namespace="", until=until)
    each = pins.kept(trial.cache).nbytes // 3
    assert pins.keep_within(trial.cache, 3 * each) == 0
    assert pins.keep_within(trial.cache, 2 * each) == 1
    assert [tuple(pins.tokens_of(mark)) for mark in pins.pinned(trial.cache)] == [forever, later]
    assert pins.keep_within(trial.cache, each) == 1
    assert [tuple(pins.tokens_of(mark)) for mark in pins.pinned(trial.cache)] == [forever]
    assert pins.keep_within(trial.cache, 0) == 1
    trial.cache.check()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_namespaces_are_cleared_and_counted_apart(layout: Layout) -> None:
    trial = Trial(layout)
    for namespace in ("a", "b"):
        trial.commit(CHAT[:20], namespace=namespace)
        assert pins.pin(trial.cache, as_tokens(CHAT[:20]), namespace=namespace, until=5.0)
    assert [pins.namespace_of(trial.cache, mark) for mark in pins.pinned(trial.cache)] == ["a", "b"]
    assert pins.kept(trial.cache, namespace="a").nbytes * 2 == pins.kept(trial.cache).nbytes == trial.cache.ledger.held
    trial.cache.clear("a")
    trial.cache.check()
    assert list(trial.cache.roots) == ["b"]
    assert pins.kept(trial.cache, namespace="a") == pins.Kept()
    assert pins.kept(trial.cache).nbytes == trial.cache.ledger.held > 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_clearing_lets_all_pins_go(layout: Layout) -> None:
    trial = _trial(layout)
    pins.pin(trial.cache, as_tokens(CHAT[:20]), namespace="", until=9.0)
    pins.retain(trial.cache, as_tokens(CHAT[:30]), namespace="", until=9.0)
    trial.clear()
    trial.cache.check()
    assert trial.cache.ledger.held == 0


def test_a_pin_holds_its_path_alone_when_the_chat_has_branches() -> None:
    trial = _trial(EXAMPLES[0])
    trial.commit((*CHAT[:20], *range(100, 120)), kind=BoundaryKind.GENERATION_END)
    pins.pin(trial.cache, as_tokens(CHAT[:30]), namespace="", until=9.0)
    assert _evict_all(trial) == 30
    assert trial.cache.ledger.tokens == 30
