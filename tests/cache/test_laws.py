"""The two laws: reuse never changes what is read, and whatever could be reused is reused."""

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.policy import EvictionCandidate
from reprise.core.kinds import Full, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens
from reprise.replay.policies import Lru
from tests.cache.hash_model import ALIVE, ENTRY_NBYTES, SNAPSHOT_NBYTES, HashSource
from tests.cache.strategies import BUDGETS, EXAMPLES, NAMESPACES, layouts, runs, spans
from tests.cache.trial import CacheTrial
from tests.matrix import examples, now_and_later

BASE = tuple(i % 3 for i in range(37))


class LargestFirst(Lru):
    """Evicts what frees most, so that a path's end goes before what hangs on it."""

    def score(self, candidate: EvictionCandidate) -> float:
        return -float(candidate.nbytes)


def by_name(layout: Layout) -> str:
    return "+".join([*map(str, layout.kinds), *(["snapshots"] if layout.has_snapshots else [])])


@st.composite
def turns(draw: st.DrawFn, most: int = 8) -> list[tuple[str, tuple[int, ...]]]:
    """Prompts of one or two namespaces, most of them grown from an earlier one cut anywhere."""
    known: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, most))):
        base: tuple[int, ...] = ()
        if known and draw(st.booleans()):
            base = draw(st.sampled_from(known))[1]
            base = base[: draw(st.integers(0, len(base)))]
        known.append((draw(NAMESPACES), base + draw(runs())))
    return known


@settings(max_examples=examples(80), deadline=None)
@given(layout=layouts(), stored=turns(), asked=turns(4), compacts=st.booleans())
def test_without_eviction_all_that_was_stored_is_reused(layout, stored, asked, compacts) -> None:
    trial = CacheTrial(layout)
    for namespace, tokens in stored:
        assert trial.commit(tokens, namespace=namespace)
        trial.judge()
    if compacts:
        while trial.cache.compact(max_entries=5) > 0:
            trial.judge()
    for namespace, tokens in [*stored, *asked]:
        trial.judge_read(tokens, namespace=namespace)
        trial.judge_read(tokens, namespace=namespace, limit=len(tokens))
    trial.judge_contents()


@settings(max_examples=examples(80), deadline=None)
@given(layout=layouts(), stored=turns(), asked=turns(4), num_lost=st.integers(0, 3), drawn=st.data())
def test_images_are_reused_whole_or_not_at_all(layout, stored, asked, num_lost, drawn) -> None:
    trial = CacheTrial(layout)
    for namespace, tokens in stored:
        assert trial.commit(tokens, namespace=namespace)
    for _ in range(num_lost):
        trial.evict()
    for namespace, tokens in [*stored, *asked]:
        images = drawn.draw(spans(len(tokens)))
        for limit in range(len(tokens) + 1):
            trial.judge_read(tokens, namespace=namespace, limit=limit, spans=images)


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_checkpoint_inside_an_image_does_not_make_its_start_resumable(layout: Layout) -> None:
    trial = CacheTrial(layout)
    for length in (5, 10, len(BASE)):
        trial.commit(BASE[:length])
    for start in range(10):
        trial.judge_read(BASE, limit=20, spans=[Span(start, 12)])


@settings(max_examples=examples(80), deadline=None)
@given(layout=layouts(), budget=BUDGETS, chats=turns(10), moves=st.lists(st.integers(0, 9), max_size=30))
def test_under_pressure_what_is_left_is_right_and_is_reused(layout, budget, chats, moves) -> None:
    trial = CacheTrial(layout, budget)
    for (namespace, tokens), move in zip(chats, [*moves, *[0] * len(chats)], strict=False):
        trial.request(tokens, namespace=namespace)
        trial.commit(tokens[: max(1, len(tokens) - move)], namespace=namespace)
        trial.judge()
        if move % 2 == 0:
            trial.release(move)
        if move % 3 == 0:
            trial.evict()
        trial.judge()
    trial.judge_contents()


@pytest.mark.parametrize("first", now_and_later([0], [1, 2]))
@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_every_position_of_an_edge_is_a_place_to_leave_it(layout: Layout, first: int) -> None:
    for at in {*range(first, len(BASE), 3), len(BASE)}:
        trial = CacheTrial(layout)
        trial.commit(BASE[:20])
        trial.commit(BASE)
        trial.request(BASE)
        branch = (*BASE[:at], 7, 7, 7)
        trial.request(branch)
        trial.commit(branch)
        trial.judge()
        for limit in range(len(BASE) + 1):
            trial.judge_read(BASE, limit=limit)
        trial.judge_contents()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_source_that_fails_changes_nothing(layout: Layout, *, is_known: bool) -> None:
    longer = (*BASE[:25], 8, *range(31))
    for fails_after in range(12):
        trial = CacheTrial(layout)
        if is_known:
            trial.commit(BASE)
        books = (trial.cache.stats, trial.cache.tree.clock)
        if trial.commit(longer, fails_after=fails_after) is None:
            assert books == (trial.cache.stats, trial.cache.tree.clock)
        else:
            assert fails_after > 0
        trial.judge()
        trial.judge_contents()
        trial.judge_read(longer)


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_conversation_is_stored_once(layout: Layout) -> None:
    trial = CacheTrial(layout)
    chat: tuple[int, ...] = ()
    for turn in range(6):
        chat = (*chat, *(turn + i for i in range(9)))
        done = trial.commit(chat)
        assert done is not None and done.num_tokens == 9
        again = trial.commit(chat)
        assert again is not None and again.num_tokens == 0 and again.nbytes == 0
    for turn in range(5):
        trial.commit((*chat[:30], 100 + turn))
    trial.judge_contents()
    assert trial.cache.stats.num_tokens == 54 + 5
    if layout == Layout(kinds=(Full(),), has_snapshots=True):
        assert trial.cache.nbytes == 59 * ENTRY_NBYTES + 11 * SNAPSHOT_NBYTES


def test_a_window_that_has_wrapped_resumes_wherever_its_entries_still_reach() -> None:
    trial = CacheTrial(Layout(kinds=(Full(), Window(8))))
    trial.commit(BASE[:30])
    reachable = [limit for limit in range(31) if trial.request(BASE[:30], limit=limit, is_held=False) == limit]
    assert reachable == [0, 30]
    trial.commit(BASE[:33])
    # Entries [23, 33) are there, and the window needs the seven before a position.
    reachable = [limit for limit in range(34) if trial.request(BASE[:33], limit=limit, is_held=False) == limit]
    assert reachable == [0, 30, 31, 32, 33]


def test_namespaces_share_nothing() -> None:
    trial = CacheTrial(Layout(kinds=(Full(),)))
    trial.commit(BASE, namespace="one")
    assert trial.request(BASE, namespace="two") == 0
    trial.commit(BASE, namespace="two")
    assert trial.cache.nbytes == 2 * len(BASE) * ENTRY_NBYTES
    trial.judge()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_what_cannot_fit_is_refused_and_nothing_is_evicted_for_it(layout: Layout) -> None:
    trial = CacheTrial(layout)
    trial.commit(BASE)
    trial.cache.memory.resize(trial.cache.nbytes)
    trial.request(BASE, limit=len(BASE))
    done = trial.commit((9, 9, *BASE, *BASE, *BASE))
    assert done is not None and not done.is_resumable and done.num_tokens == 0 and done.nbytes == 0
    assert trial.cache.stats.num_evictions == 0 or not any(isinstance(kind, Full) for kind in layout.kinds)
    trial.judge()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_commit_evicts_nothing_of_the_path_that_it_extends(layout: Layout) -> None:
    trial = CacheTrial(layout)
    trial.commit(BASE)
    trial.cache.memory.resize(trial.cache.nbytes)
    # Wanted, so that anything may go for it; there is nothing but the path itself, on which nobody has a lease.
    done = trial.commit((*BASE, 9, 9, 9), pinned_until=5.0)
    assert done is not None
    trial.judge()
    if any(isinstance(kind, Full) for kind in layout.kinds):
        assert not done.is_resumable
        assert trial.request(BASE, limit=len(BASE), is_held=False) == len(BASE)


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_commit_of_what_is_there_succeeds_over_the_budget(layout: Layout) -> None:
    trial = CacheTrial(layout)
    trial.commit(BASE)
    trial.request(BASE, limit=len(BASE))
    trial.cache.memory.resize(1)
    done = trial.commit(BASE)
    assert done is not None and done.is_resumable and done.nbytes == 0
    trial.judge()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_pin_outlasts_pressure_and_then_runs_out(layout: Layout) -> None:
    trial = CacheTrial(layout)
    trial.commit(BASE[:20], pinned_until=5.0, kind=BoundaryKind.EXPLICIT)
    trial.commit(BASE)
    trial.judge()
    while trial.cache.evict_one():
        trial.judge()
    assert trial.request(BASE, is_held=False) == 20
    trial.clock.now = 5.0
    while trial.cache.evict_one():
        trial.judge()
    assert trial.cache.nbytes == 0 and trial.cache.stats.num_tokens == 0


@pytest.mark.parametrize("pinned_at", range(1, len(BASE)))
def test_pins_that_ran_out_inside_an_edge_go_with_it(pinned_at: int) -> None:
    trial = CacheTrial(Layout(kinds=(Full(),)), policy=LargestFirst())
    trial.commit(BASE)
    trial.commit(BASE[:pinned_at], pinned_until=5.0)
    trial.request(BASE, limit=len(BASE))
    trial.clock.now = 5.0
    trial.release(0)
    while trial.cache.evict_one():
        trial.judge()
    assert trial.cache.stats.num_tokens == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_all_is_evicted_but_what_is_leased(layout: Layout) -> None:
    trial = CacheTrial(layout)
    trial.commit(BASE[:20])
    trial.commit(BASE)
    trial.commit((*BASE[:5], 9, 9, 9))
    trial.request(BASE, limit=20)
    trial.clear()
    trial.judge()
    assert trial.request(BASE, is_held=False) == 20
    assert trial.cache.stats.num_tokens == 20
    trial.release(0)
    trial.clear()
    trial.judge()
    assert trial.cache.nbytes == 0 and trial.cache.stats.num_tokens == 0 and not trial.cache.tree.roots


def test_a_path_of_hundreds_of_edges_is_evicted_whole() -> None:
    trial = CacheTrial(Layout(kinds=(), has_snapshots=True))
    cache = trial.cache
    chat = tuple(i % 5 for i in range(200))
    for length in range(1, len(chat) + 1):
        cache.commit(as_tokens(chat[:length]), HashSource(chat[:length]), kind=BoundaryKind.INTERVAL)
    match = cache.match(as_tokens(chat))
    lease = cache.lease(match, len(chat))
    cache.commit(as_tokens((*chat, 1)), HashSource((*chat, 1)), kind=BoundaryKind.INTERVAL)
    cache.release(lease)
    cache.clear()
    assert cache.stats.num_tokens == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_bytes_that_the_books_give_back_are_given_back(layout: Layout) -> None:
    trial = CacheTrial(layout)
    gc.collect()
    others = set(ALIVE)

    def alive() -> int:
        # At once, without the garbage collector: memory is short when there is much to give back.
        return sum(payload.nbytes for payload in set(ALIVE) - others)

    for turn in range(1, 13):
        trial.commit(BASE[: 3 * turn], kind=BoundaryKind.STABLE)
        if trial.held:
            trial.release(0)
        else:
            trial.request(BASE)
        assert alive() == trial.cache.nbytes
    while trial.cache.compact(max_entries=10) > 0:
        assert alive() == trial.cache.nbytes
    while trial.cache.evict_one():
        assert alive() == trial.cache.nbytes
    assert trial.cache.nbytes == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
@pytest.mark.parametrize("leased_at", [10, 20, 30])
def test_what_is_superseded_stays_for_a_lease_at_it_and_for_no_other(layout: Layout, leased_at: int) -> None:
    trial = CacheTrial(layout)
    for length in (10, 20, 30):
        trial.commit(BASE[:length])
    assert trial.request(BASE[:31], limit=leased_at) == leased_at
    protected = trial.cache.protected_nbytes()
    while trial.cache.evict_one():
        trial.judge()
    assert trial.request(BASE, is_held=False, limit=leased_at) == leased_at
    if not layout.resumes_anywhere:
        assert trial.cache.stats.num_checkpoints == 1
    assert 0 < protected <= trial.cache.nbytes or not trial.layout.has_snapshots


@pytest.mark.parametrize("leased_at", range(14, len(BASE) + 1))
def test_a_chat_loses_its_end_down_to_a_lease(leased_at: int) -> None:
    trial = CacheTrial(Layout(kinds=(Full(),)))
    trial.commit(BASE)
    trial.request(BASE, limit=leased_at)
    while trial.cache.evict_one():
        trial.judge()
    assert trial.cache.stats.num_tokens == leased_at


def test_what_a_lease_alone_kept_goes_with_it() -> None:
    trial = CacheTrial(Layout(kinds=(Full(), Window(8))))
    for length in (20, 23, 37):
        trial.commit(BASE[:length])
    assert trial.request(BASE, limit=22) == 22
    trial.commit((*BASE[:30], 9))
    while trial.cache.evict_one():
        trial.judge_contents()
    trial.release(0)
    trial.judge()
    trial.judge_contents()


def test_window_entries_go_with_the_last_who_needs_them() -> None:
    trial = CacheTrial(Layout(kinds=(Full(), Window(8))))
    for length in (20, 23):
        trial.commit(BASE[:length], kind=BoundaryKind.SYSTEM)
    trial.request(BASE[:23], limit=22)
    while trial.cache.evict_one():
        trial.judge()
    trial.commit(BASE)
    trial.release(0)
    trial.judge_contents()
    # The lease at 22 kept [20, 22), which neither the checkpoint at 20 nor that at 37 needs.
    assert trial.request(BASE, limit=22, is_held=False) == 20


def test_nothing_is_evicted_for_what_the_leases_leave_no_room_for() -> None:
    trial = CacheTrial(Layout(kinds=(Full(),)))
    trial.commit(BASE)
    trial.request(BASE, limit=len(BASE))
    trial.commit((5, *BASE[:10]))
    trial.cache.memory.resize(trial.cache.nbytes)
    # Pinned, so that it would be stored whatever it is worth.
    done = trial.commit((9, *BASE), pinned_until=5.0)
    assert done is not None and not done.is_resumable
    assert trial.cache.stats.num_evictions == 0
    done = trial.commit((9, *BASE[:10]), pinned_until=5.0)
    assert done is not None and done.is_resumable
    trial.judge()


def test_a_commit_takes_nothing_for_its_own_that_lies_beside_its_path() -> None:
    """The edge in which both part has another chat's checkpoints behind that place, which its request protects."""
    trial = CacheTrial(Layout(kinds=(), has_snapshots=True), 3 * SNAPSHOT_NBYTES)
    long, short = (1, 2, 1, 1, 0, 2, 0, 1, 1), (9, 9, 9)
    trial.commit(long[:5], kind=BoundaryKind.LAST_USER)
    trial.request(long[:6])
    trial.commit(long, kind=BoundaryKind.SYSTEM)
    trial.request((*long, 2))
    trial.release(0)
    trial.commit(short)
    trial.request((*short, 1))
    trial.commit((1, 0, 0, 1, 2, 2, 0, 1), kind=BoundaryKind.LAST_USER)
    trial.judge()
    for path in (long[:5], long, short):
        assert trial.cache.lookup(as_tokens(path), len(path))[0] == len(path)
