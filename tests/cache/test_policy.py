"""The order of eviction, as the store sees it."""

from collections.abc import Collection

import pytest

from reprise.cache.lookup import evicted_to
from reprise.cache.node import Lease, SegmentSizes, subtree
from reprise.cache.policy import EvictionCandidate, ExpectedSaving, Policy
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.job import Lineage
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, join_tokens
from reprise.memory import Memory
from reprise.replay.payloads import SizedSnapshot, SizedSource, Sizes
from reprise.replay.policies import POLICIES, GreedyDual, Lru
from tests.cache.test_reuse_rate import run_of

FULL, HYBRID = Sizes(full=1), Sizes(full=1, snapshot=100)


def candidate(**changes: object) -> EvictionCandidate:
    known: dict[str, object] = {
        "kind": BoundaryKind.STABLE,
        "cost": 100,
        "nbytes": 100,
        "last_use": 1,
        "now": 2,
        "num_uses": 0,
        "num_branches": 0,
        "is_superseded": False,
        "is_auxiliary": False,
    }
    return EvictionCandidate(**(known | changes))  # type: ignore[arg-type]


def store(policy: str, sizes: Sizes, budget: int | None) -> PrefixCache:
    return PrefixCache(
        sizes.layout(), memory=Memory(budget), policy=POLICIES[policy](), sizes=SegmentSizes(longest=64, tail=16)
    )


def serve(
    cache: PrefixCache,
    tokens: Tokens,
    sizes: Sizes,
    *,
    kind: BoundaryKind = BoundaryKind.STABLE,
    is_auxiliary: bool = False,
    is_pinned: bool = False,
    stable_at: int | None = None,
    num_answered: float | None = None,
) -> int:
    match = cache.match(tokens)
    resume_at = cache.resume_at(match, limit=len(tokens) - 1)
    lease = cache.lease(match, resume_at)
    source = SizedSource(sizes, 1)
    lease.is_restored = True
    cache.commit(
        tokens,
        source,
        kind=kind,
        is_auxiliary=is_auxiliary,
        overrides_admission=is_pinned,
        stable_at=stable_at,
    )
    if is_pinned:
        assert cache.pin(tokens, namespace="", until=float("inf"))
    if num_answered is not None:
        cache.note_answer(lease, num_answered)
    cache.release(lease)
    cache.check()
    return resume_at


def know_enough(policy: Policy) -> None:
    """What older chats are believed to do counts from now on."""
    for n in range(1000):
        policy.arrive(run_of(10_000 + n, 4), known=0, namespace="other")


def resumes_at(cache: PrefixCache, tokens: Tokens) -> int:
    return cache.resume_at(cache.match(tokens), limit=len(tokens))


def test_who_branched_off_a_path_and_lost_that_is_told_too_when_the_path_is_cut() -> None:
    cache, trunk = store("lru", Sizes(full=1), None), run_of(1, 80)
    branch = join_tokens(trunk[:70], run_of(2, 40))
    for tokens in (branch, trunk, trunk):
        serve(cache, tokens, Sizes(full=1))
    lost: list[int] = []
    while (held := resumes_at(cache, branch)) > 40:
        assert held == len(branch) or evicted_to(cache.match(branch), held) == len(branch)
        lost.append(held)
        cache.compact_path(trunk)
        cache.evict_one()
    assert {70, 64} <= {*lost}, "cut where it branches off, and a little before"


def test_lru_orders_by_last_use() -> None:
    assert Lru().score(candidate(last_use=3)) < Lru().score(candidate(last_use=4))
    assert Lru().admits(candidate(), candidate(last_use=1000), is_exact=False)


class AlwaysDue(Lru):
    """Has every item due for another review at once, as one that has missed a prompt does."""

    num_reviews = 0

    def review_at(self, candidate: EvictionCandidate) -> int | None:
        self.num_reviews += 1
        assert self.num_reviews < 100, "the reviews of one prompt do not end"
        return 0


def test_what_is_due_again_at_once_waits_for_the_next_prompt() -> None:
    cache = PrefixCache(HYBRID.layout(), memory=Memory(), policy=AlwaysDue())
    for number in range(3):
        serve(cache, run_of(number, 64), HYBRID)
    cache.check()


class FailsOnce(Lru):
    """Raises at the second prompt."""

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> tuple[int, int | None]:
        number, continued = super().arrive(tokens, known=known, namespace=namespace)
        if number == 2:
            raise RuntimeError("planted")
        return number, continued


def test_a_lease_that_fails_protects_nothing() -> None:
    cache = PrefixCache(HYBRID.layout(), memory=Memory(), policy=FailsOnce())
    serve(cache, run_of(1, 64), HYBRID)
    match = cache.match(run_of(1, 64))
    with pytest.raises(RuntimeError, match="planted"):
        cache.lease(match, match.length)
    cache.check()
    assert cache.protected_nbytes() == 0
    serve(cache, run_of(1, 64), HYBRID)


def test_greedy_dual_ages_by_what_it_gave_up() -> None:
    policy = GreedyDual()
    assert policy.score(candidate(cost=200)) > policy.score(candidate(cost=100))
    assert policy.score(candidate(num_uses=1)) == 2 * policy.score(candidate())
    policy.evicted(candidate(now=7), 5.0)
    policy.evicted(candidate(now=8), 3.0)
    assert policy.score(candidate(last_use=7, nbytes=0)) == 0.0
    assert policy.score(candidate(last_use=8, nbytes=0)) == policy.score(candidate(last_use=9, nbytes=0)) == 5.0
    assert policy.score(candidate(last_use=9)) > policy.score(candidate(num_uses=3))


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"cost": 50}, {"cost": 100}),
        ({"nbytes": 200}, {"nbytes": 100}),
        ({"is_auxiliary": True}, {}),
        ({"is_superseded": True}, {"cost": 1}),
        ({"is_superseded": True}, {"is_superseded": True, "num_branches": 2}),
        ({"is_superseded": True}, {"is_superseded": True, "num_uses": 2}),
        ({"is_superseded": True, "cost": 10}, {"is_superseded": True, "cost": 100}),
        ({"nbytes": 0}, {}),
    ],
)
def test_what_saves_less_is_worth_less(worse: dict[str, object], better: dict[str, object]) -> None:
    policy = ExpectedSaving()
    policy.arrive(run_of(0, 50), known=0, namespace="")
    assert policy.score(candidate(last_visit=1, **worse)) < policy.score(candidate(last_visit=1, **better))


def test_the_end_that_a_chat_went_on_from_is_left_behind() -> None:
    policy = ExpectedSaving()
    first = run_of(0, 100)
    policy.arrive(first, known=0, namespace="")
    assert policy.score(candidate(last_visit=1)) > 0
    policy.arrive(join_tokens(first, run_of(1, 50)), known=100, namespace="")
    assert policy.score(candidate(last_visit=1)) < 0
    assert policy.score(candidate(last_visit=1, kind=BoundaryKind.SYSTEM)) > 0
    assert policy.score(candidate(last_visit=2)) > 0


def test_the_same_prompts_give_the_same_order() -> None:
    scores: list[list[float]] = []
    for _ in range(2):
        policy = ExpectedSaving()
        for seed in range(200):
            policy.arrive(run_of(seed % 17, 40 + seed % 5), known=0, namespace="")
        scores.append([policy.score(candidate(last_visit=n, first_visit=n)) for n in range(1, 201)])
    assert scores[0] == scores[1]


def test_superseded_ends_stay_while_there_is_room_and_go_first_when_there_is_not() -> None:
    chats = {n: [run_of(10 * n + turn, 30) for turn in range(5)] for n in range(1, 5)}
    cache = store("cost", HYBRID, None)
    for turn in range(1, 6):
        for parts in chats.values():
            serve(cache, join_tokens(*parts[:turn]), HYBRID)
    for parts in chats.values():
        for turn in range(1, 6):
            assert resumes_at(cache, join_tokens(*parts[:turn])) == 30 * turn, "an edit resumes right there"
    cache.memory.resize(4 * (150 + 2 * 100))
    cache.memory.reserve(0)
    cache.check()
    held = [mark for root in cache.tree.roots.values() for node in subtree(root) for mark in node.checkpoints.values()]
    assert len(held) <= 2 * len(chats)
    for parts in chats.values():
        assert resumes_at(cache, join_tokens(*parts)) == 150, "the newest turn of each chat is there"


def test_what_a_prompt_left_beside_its_settled_continuation_goes_first() -> None:
    cache = store("cost", HYBRID, None)
    lasting, thinking, answer = run_of(0, 80), run_of(1, 40), run_of(2, 30)
    prompt = join_tokens(lasting, run_of(3, 4))
    serve(cache, prompt, HYBRID, kind=BoundaryKind.PROMPT_END, stable_at=80)
    end = join_tokens(prompt, thinking, answer)
    cache.commit(end, SizedSource(HYBRID, 1), kind=BoundaryKind.GENERATION_END, stable_at=80)
    settled = join_tokens(lasting, answer)
    cache.commit(settled, SizedSource(HYBRID, 1), kind=BoundaryKind.STABLE)
    cache.check()
    held = [mark for root in cache.tree.roots.values() for node in subtree(root) for mark in node.checkpoints.values()]
    assert {mark.position: mark.is_superseded for mark in held} == {84: True, 154: True, 110: False}
    cache.memory.resize(cache.nbytes - 1)
    cache.memory.reserve(0)
    assert resumes_at(cache, settled) == 110
    cache.memory.resize(110 + 100)
    cache.memory.reserve(0)
    cache.check()
    assert resumes_at(cache, settled) == 110
    assert cache.nbytes == 110 + 100


@pytest.mark.parametrize("is_read", [True, False], ids=["read from disk", "computed"])
def test_a_chat_with_the_same_beginning_supersedes_no_end_beside_it(*, is_read: bool) -> None:
    cache = store("cost", HYBRID, None)
    shared = run_of(0, 50)
    prompt, other = join_tokens(shared, run_of(1, 30)), join_tokens(shared, run_of(2, 100))
    cache.release(cache.lease(cache.match(prompt), 0))
    if is_read:
        # Nobody has asked for the other yet.
        cache.commit(shared, SizedSource(HYBRID, 1), kind=BoundaryKind.SYSTEM, stable_at=80)
    end = join_tokens(prompt, run_of(3, 9))
    cache.commit(end, SizedSource(HYBRID, 1), kind=BoundaryKind.GENERATION_END, stable_at=80)
    if not is_read:
        # So much of it is new behind its stable position that this is not seen to be the second prompt's.
        cache.release(cache.lease(cache.match(other), 0))
    cache.commit(other[:55], SizedSource(HYBRID, 1), kind=BoundaryKind.STABLE, stable_at=None if is_read else 55)
    cache.check()
    assert not any(mark.is_superseded for mark in cache.tree.checkpoints())


def test_an_end_survives_those_that_stand_close_below_it() -> None:
    # The last-user snapshot is 5 tokens below: beside it alone the new one would be worth next to nothing.
    cache = store("cost", HYBRID, 2 * (105 + 2 * 100))
    for chat in range(2):
        tokens = run_of(chat, 105)
        serve(cache, tokens[:100], HYBRID, kind=BoundaryKind.LAST_USER)
        serve(cache, tokens, HYBRID)
    serve(cache, run_of(7, 90), HYBRID)
    assert [resumes_at(cache, run_of(chat, 105)) for chat in range(2)] == [105, 105]


@pytest.mark.parametrize("policy", POLICIES)
def test_pins_and_leases_stay_whatever_they_are_worth(policy: str) -> None:
    cache = store(policy, HYBRID, 1000)
    pinned, leased = run_of(0, 60), run_of(1, 60)
    serve(cache, pinned, HYBRID, kind=BoundaryKind.EXPLICIT, is_pinned=True)
    serve(cache, leased, HYBRID)
    lease = cache.lease(cache.match(leased), 60)
    for seed in range(2, 40):
        serve(cache, run_of(seed, 60), HYBRID)
        assert cache.nbytes <= 1000
        assert resumes_at(cache, pinned) == 60
        assert resumes_at(cache, leased) == 60
    cache.release(lease)


@pytest.mark.matrix
def test_what_comes_once_does_not_wash_out_chats() -> None:
    sizes = Sizes(full=1)
    reused = {"lru": 0, "cost": 0}
    for policy in reused:
        cache = store(policy, sizes, 2000)
        chats = {n: run_of(n, 100) for n in range(8)}
        seed = 100
        for _ in range(20):
            for n, before in list(chats.items()):
                chats[n] = run_of(n, 100) if len(before) > 260 else join_tokens(before, run_of(seed, 20))
                reused[policy] += serve(cache, chats[n], sizes)
                serve(cache, run_of(seed + 1, 300), sizes)
                seed += 2
    assert reused["cost"] > 3 * reused["lru"]


def test_of_what_is_admitted_in_part_the_beginning_is_kept() -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, 400)
    # Two that come back again and again are worth more than a new one, and nothing else is.
    chats = [run_of(n, 100) for n in range(2)]
    for turn in range(40):
        for n in range(2):
            serve(cache, chats[n], sizes)
            serve(cache, run_of(10 + 2 * turn + n, 60), sizes)
    once = run_of(5, 350)
    serve(cache, once, sizes)
    assert [resumes_at(cache, chat) for chat in chats] == [100, 100]
    assert 0 < resumes_at(cache, once) < 350
    assert 400 - cache.tree.sizes.tail < cache.nbytes <= 400, "nothing was evicted for nothing"


@pytest.mark.parametrize("has_tail", [False, True])
def test_what_next_turns_do_not_have_goes_before_what_they_have(*, has_tail: bool) -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, None)
    chats = {n: (run_of(n, 100), run_of(10 + n, 40)) for n in range(4)}
    for turn in range(1, 6):
        for n, (before, tail) in chats.items():
            kept = join_tokens(before, tail) if has_tail else before
            lasting = join_tokens(kept, run_of(100 * turn + n, 60))
            chats[n] = (lasting, run_of(100 * turn + 10 + n, 40))
            serve(cache, join_tokens(*chats[n]), sizes, kind=BoundaryKind.GENERATION_END, stable_at=len(lasting))
    cache.memory.reserve(0)
    for lasting, tail in chats.values():
        assert resumes_at(cache, join_tokens(lasting, tail)) == len(lasting) + 40, "there is room"
    # As much has to go as there is behind the stable boundaries.
    cache.memory.resize(cache.nbytes - 4 * 40)
    cache.memory.reserve(0)
    cache.check()
    whole = [resumes_at(cache, lasting) == len(lasting) for lasting, _ in chats.values()]
    assert all(whole) is not has_tail


def test_an_end_is_exact_at_the_stable_boundary_and_the_rest_is_worth_what_it_was() -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, None)
    tokens = run_of(0, 100)
    serve(cache, tokens, sizes, kind=BoundaryKind.GENERATION_END, stable_at=70)
    ends = [100, 84, 70, 54]  # 16 tokens at a time, but not of both sides at once.
    scores: list[float] = []
    for end in ends:
        assert resumes_at(cache, tokens) == end
        leaf = next(iter(next(iter(cache.tree.roots.values())).children.values()))
        scores.append(cache.order.policy.score(cache.order.candidate(leaf.checkpoints[end])))
        cache.evict_one()
        cache.check()
    assert scores[0] == scores[1] < scores[2] == scores[3]


@pytest.mark.matrix
def test_answers_tell_who_comes_back() -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, None)
    # A word is the answer to a task, and a page that to a question of a chat.
    for n in range(100):
        chat = run_of(n, 100)
        serve(cache, chat, sizes, num_answered=2)
        serve(cache, chat := run_of(1000 + n, 100), sizes, num_answered=300)
        serve(cache, join_tokens(chat, run_of(2000 + n, 10)), sizes, num_answered=300)
    policy = cache.order.policy
    scores: list[float] = []
    for seed, num_answered in ((5000, 2), (5001, 300), (5002, None)):
        serve(cache, run_of(seed, 100), sizes, num_answered=num_answered)
        scores.append(policy.score(candidate(last_visit=301 + len(scores))))
    word, page, unknown = scores
    assert word < unknown < page


class ToolCallers:
    """Agents that call tools, each on a path of its own of about 100 tokens, in a store for three of those."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cache = PrefixCache(
            FULL.layout(),
            memory=Memory(320),
            sizes=SegmentSizes(longest=64, tail=16),
            clock=lambda: self.now_s,
        )
        self.paths: dict[int, Tokens] = {}
        # Four agents at a time call a tool four times and come back at once; five minutes later others begin.
        for first in range(100, 200, 4):
            for _ in range(5):
                for agent in range(first, first + 4):
                    self.answer(self.ask(agent))
            self.now_s += 300

    def ask(self, agent: int, lineage: Lineage | None = None) -> Lease:
        old = self.paths.get(agent, run_of(agent, 100))
        tokens = self.paths[agent] = join_tokens(old, run_of(1000 * agent + len(old), 1))
        resume_at, match = self.cache.lookup(tokens, len(tokens) - 1)
        lease = self.cache.lease(match, resume_at)
        if lineage is not None:
            self.cache.note_lineage(f"{agent}", lease, lineage, trunk_at=0, namespace="")
        self.cache.commit(tokens, SizedSource(FULL, 1), kind=BoundaryKind.STABLE, number=lease.number)
        return lease

    def answer(self, lease: Lease, *, calls_tool: bool = True) -> None:
        self.now_s += 1
        self.cache.note_answer(lease, 100, calls_tool=calls_tool)
        self.cache.release(lease)
        self.cache.check()

    def kept(self, agent: int) -> bool:
        return resumes_at(self.cache, self.paths[agent]) == len(self.paths[agent])


@pytest.mark.parametrize(("silent_s", "goes_first"), [(10, False), (200, True)])
def test_who_is_silent_for_longer_than_tools_take_goes_first(silent_s: int, *, goes_first: bool) -> None:
    agents = ToolCallers()
    working, silent = agents.ask(1), agents.ask(2)
    agents.answer(silent)
    agents.now_s += silent_s
    agents.answer(working)
    agents.answer(agents.ask(3))
    ((_, first),) = agents.cache.would_evict(1)
    assert (first.last_visit == silent.number) is goes_first
    agents.answer(agents.ask(4))
    assert agents.kept(1)
    assert agents.kept(2) is not goes_first


@pytest.mark.parametrize("is_awaited", [True, False])
def test_who_waits_for_others_is_not_silent(*, is_awaited: bool) -> None:
    agents = ToolCallers()
    parent, other = agents.ask(1, Lineage()), agents.ask(2)
    agents.answer(parent)
    for _ in range(4):
        agents.now_s += 100
        agents.answer(agents.ask(3, Lineage(awaited=("1",) if is_awaited else ())))
    agents.answer(other)
    ((_, first),) = agents.cache.would_evict(1)
    assert (first.last_visit == parent.number) is not is_awaited


class SecondFallsSilent(Lru):
    """The second prompt falls silent when the fourth arrives, and is worth nothing from then on."""

    has_fallen = False

    def fall_silent(self, now_s: float) -> Collection[int]:
        self.has_fallen = self._num_prompts == 4
        return [2] if self.has_fallen else ()

    def score(self, candidate: EvictionCandidate) -> float:
        return 0.0 if self.has_fallen and candidate.last_visit == 2 else super().score(candidate)


def test_what_falls_silent_is_scored_anew() -> None:
    cache = PrefixCache(HYBRID.layout(), memory=Memory(), policy=SecondFallsSilent())
    for number in range(4):
        serve(cache, run_of(number, 64), HYBRID)
    assert cache.evict_one()
    assert [resumes_at(cache, run_of(number, 64)) > 0 for number in range(4)] == [True, False, True, True]


def test_a_prompt_falls_silent_once_at_each_edge_and_not_once_its_chat_has_gone_on() -> None:
    policy, path = ExpectedSaving(), run_of(1, 20)
    for tokens, at_s in ((run_of(2, 20), 0.0), (path, 0.0), (join_tokens(path, run_of(3, 20)), 50.0)):
        number, _ = policy.arrive(tokens, known=0, namespace="")
        policy.answered(number, 100, calls_tool=True, at_s=at_s)
    expected = {1: set(), 29: {1}, 30: {1}, 31: set(), 80: {3}, 600: {1, 3}, 2000: {3}}
    assert {at_s: policy.fall_silent(at_s) for at_s in expected} == expected


def test_an_answer_that_took_long_holds_up_no_other() -> None:
    policy = ExpectedSaving()
    for seed, at_s in ((1, 100.0), (2, 3.0)):
        number, _ = policy.arrive(run_of(seed, 20), known=0, namespace="")
        policy.answered(number, 100, calls_tool=True, at_s=at_s)
    assert [policy.fall_silent(at_s) for at_s in (40, 131)] == [{2}, {1, 2}]


def in_turn() -> tuple[ExpectedSaving, list[int]]:
    """What three agents in turn have taught that ask every six seconds, and their last prompts.

    Behind each prompt come others within the same second, which nobody goes on with.
    """
    policy, paths, numbers = ExpectedSaving(), [run_of(seed, 20) for seed in range(3)], [0, 0, 0]
    for turn in range(60):
        now_s, agent = 2.0 * (turn - 59), turn % 3
        paths[agent] = join_tokens(paths[agent], run_of(100 + turn, 20))
        for each in (paths[agent], *(run_of(1000 + 6 * turn + other, 20) for other in range(6))):
            number, _ = policy.arrive(each, known=0, namespace="")
            policy.fall_silent(now_s)
            policy.answered(number, 100, calls_tool=True, at_s=now_s)
        numbers[agent] = policy.number_of(paths[agent], namespace="") or 0
    return policy, numbers


@pytest.mark.parametrize("num_arrived", [0, 1, 2])
def test_the_first_answers_are_worth_something_before_it_is_known_how_fast_prompts_come(num_arrived: int) -> None:
    policy = ExpectedSaving()
    policy.arrive(run_of(1, 20), known=0, namespace="")
    for _ in range(num_arrived):
        policy.fall_silent(0.0)
    policy.answered(1, 100, calls_tool=True, at_s=0.0)
    assert policy.score(candidate(last_visit=1, first_visit=1)) > 0


def test_who_waits_for_others_is_worth_as_much_as_if_answered_just_now() -> None:
    policy, numbers = in_turn()

    def scores(alive_at: int | None) -> list[float]:
        return [policy.score(candidate(last_visit=at, first_visit=at, alive_at=alive_at)) for at in numbers]

    assert len(set(scores(None))) == 3
    assert len(set(scores(max(numbers)))) == 1


def test_a_day_in_which_nobody_came_counts_as_the_longest_silence() -> None:
    """Else who comes behind it would be expected to be silent for ten minutes before the next prompt."""
    worth: list[float] = []
    for pause_s in (600.0, 86_400.0):
        policy, _ = in_turn()
        for number in range(2):
            policy.arrive(run_of(2000 + number, 20), known=0, namespace="")
            policy.fall_silent(pause_s + number)
        number, _ = policy.arrive(run_of(3000, 20), known=0, namespace="")
        policy.fall_silent(pause_s + 2)
        policy.answered(number, 100, calls_tool=True, at_s=pause_s + 2)
        worth.append(policy.score(candidate(last_visit=number, first_visit=number)))
    assert worth[0] == worth[1]


def test_of_an_answer_whose_time_is_not_known_no_silence_is_expected() -> None:
    scores: dict[float | None, list[float]] = {}
    for at_s in (None, 0.0, 1e9):
        policy, _ = in_turn()
        number, _ = policy.arrive(run_of(1000, 20), known=0, namespace="")
        policy.answered(number, 100, calls_tool=True, at_s=at_s)
        for now_s in (0.0, 1000.0):
            policy.fall_silent(now_s)
            scores.setdefault(at_s, []).append(policy.score(candidate(last_visit=number, first_visit=number)))
    assert scores[None] == scores[1e9] and scores[None][0] == scores[None][1] != scores[0.0][1]
    # Nobody is back within two seconds: who is known to be silent for longer soon is worth more.
    assert scores[0.0][0] > 1.2 * scores[None][0]


def test_how_the_next_turn_begins_may_be_known_after_a_silence_that_it_does_not_end() -> None:
    agents = ToolCallers()
    policy, path = agents.cache.order.policy, run_of(1, 20)
    number, _ = policy.arrive(path, known=0, namespace="")
    policy.answered(number, 100, calls_tool=True, at_s=agents.now_s)
    policy.fall_silent(agents.now_s + 200)
    silent = candidate(last_visit=number, first_visit=number)
    score = policy.score(silent)
    policy.expect(path, known=len(path), number=number, namespace="", calls_tool=True)
    assert policy.score(silent) == score


def test_an_agent_that_runs_is_expected_to_go_on_as_it_did() -> None:
    """How its answer will end is not known yet; the one before called a tool, or did not."""
    policy, number = ExpectedSaving(), 0
    for n in range(200):
        # After a tool call comes another, after a text nobody.
        for ends in ((True, True, True, False), (False, False)):
            path = run_of(2 * n + len(ends), 20)
            for calls_tool in ends:
                number, _ = policy.arrive(path, known=0, namespace="")
                policy.answered(number, 100, calls_tool=calls_tool)
                path = join_tokens(path, run_of(n, 20))
    scores: list[float] = []
    for calls_tool in (True, False):
        path = run_of(5000 + calls_tool, 20)
        number, _ = policy.arrive(path, known=0, namespace="")
        policy.answered(number, 100, calls_tool=calls_tool)
        number, _ = policy.arrive(join_tokens(path, run_of(1, 20)), known=0, namespace="")
        scores.append(policy.score(candidate(last_visit=number, first_visit=number)))
    assert scores[0] > 1.2 * scores[1]


def test_side_requests_go_before_chats() -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, 700)
    side, chat = run_of(0, 300), run_of(1, 300)
    serve(cache, side, sizes, is_auxiliary=True)
    serve(cache, chat, sizes)
    serve(cache, run_of(2, 200), sizes)
    assert resumes_at(cache, chat) == 300
    assert resumes_at(cache, side) < 300


def test_nothing_is_learned_from_work_that_nobody_asked_for() -> None:
    cache = store("cost", HYBRID, None)
    tokens = run_of(0, 50)
    serve(cache, tokens, HYBRID)
    longer = join_tokens(tokens, run_of(1, 20))
    lease = cache.lease(cache.match(longer), 50, is_request=False)
    cache.release(lease)
    mark = next(iter(next(iter(cache.tree.roots.values())).children.values())).checkpoints[50]
    assert cache.order.policy.score(cache.order.candidate(mark)) > 0, "the chat has not gone on yet"


def test_what_a_client_wants_kept_takes_the_place_of_what_is_worth_more() -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, 290)
    chat, side = run_of(0, 280), run_of(1, 280)
    serve(cache, chat, sizes)
    for is_wanted in (False, True):
        assert (resumes_at(cache, chat), resumes_at(cache, side)) == (280, 0)
        source = SizedSource(sizes, 1)
        done = cache.commit(side, source, kind=BoundaryKind.STABLE, is_auxiliary=True, overrides_admission=is_wanted)
        assert done.is_resumable is is_wanted
    assert resumes_at(cache, side) == 280


@pytest.mark.matrix
def test_chats_of_a_kind_that_never_goes_on_are_not_expected_to() -> None:
    sizes = Sizes(full=1)
    cache = store("cost", sizes, None)
    assert cache.expects_return(run_of(0, 100), namespace="")
    for n in range(600):
        serve(cache, run_of(n, 100), sizes)
    assert not cache.expects_return(run_of(599, 100), namespace="")
    for n in range(600):
        serve(cache, run_of(n, 100), sizes)
        serve(cache, join_tokens(run_of(n, 100), run_of(5000 + n, 100)), sizes)
    assert cache.expects_return(run_of(599, 100), namespace="")


def test_what_a_request_stores_counts_as_its_own_even_where_an_earlier_prompt_is_the_deepest_known() -> None:
    cache = store("cost", HYBRID, 400)
    first = run_of(1, 100)
    serve(cache, first, HYBRID)
    serve(cache, run_of(3, 80), HYBRID)
    tokens = join_tokens(first, run_of(2, 400))
    lease = cache.lease(cache.match(tokens), 100)
    source = SizedSource(HYBRID, 1)
    stored = cache.commit(tokens[:180], source, kind=BoundaryKind.INTERVAL, number=lease.number)
    assert stored.is_resumable, "or it would count as what a chat left behind when it continued elsewhere"
    cache.release(lease)


def looped_and_expected(cache: PrefixCache, sizes: Sizes) -> tuple[Tokens, Tokens, int]:
    """A tool loop of 200 tokens on a chat of 100, and how the chat's next turn is known to begin: without the loop."""
    start = run_of(1, 100)
    loop, stripped = join_tokens(start, run_of(2, 200)), join_tokens(start, run_of(3, 150))
    serve(cache, start, sizes)
    serve(cache, loop, sizes, stable_at=300)
    number = cache.order.policy.number_of(loop, namespace="")
    assert number is not None
    cache.expect(cache.match(stripped), number=number)
    cache.check()
    return loop, stripped, number


@pytest.mark.parametrize("layout", [HYBRID, Sizes(full=1, window=1, window_tokens=8)], ids=["snapshots", "window"])
def test_how_the_next_turn_begins_takes_the_room_of_what_its_chat_then_leaves(layout: Sizes) -> None:
    endless, other = store("cost", layout, None), run_of(9, 100)
    serve(endless, other, layout)
    looped_and_expected(endless, layout)
    cache = store("cost", layout, endless.nbytes + 60)
    serve(cache, other, layout)
    loop, stripped, number = looped_and_expected(cache, layout)
    stored = cache.commit(stripped, SizedSource(layout, 1), kind=BoundaryKind.STABLE, number=number, stable_at=250)
    cache.check()
    assert stored.is_resumable
    assert resumes_at(cache, other) == 100, "which another chat needs is not evicted for it"
    assert resumes_at(cache, loop) == 100


def test_a_chat_that_goes_on_as_it_was_not_expected_to_has_left_nothing() -> None:
    cache = store("cost", HYBRID, None)
    loop, _, _ = looped_and_expected(cache, HYBRID)
    tip = next(c for c in cache.tree.checkpoints() if c.position == 300)
    start = next(c for c in cache.tree.checkpoints() if c.position == 100)
    assert tip.is_superseded
    assert not start.is_superseded, "the next turn goes on there"
    cache.release(cache.lease(cache.match(loop), 300))
    assert not tip.is_superseded
    assert start.is_superseded


def test_what_other_chats_left_beside_the_next_turn_is_theirs() -> None:
    cache = store("cost", HYBRID, None)
    start = run_of(1, 100)
    serve(cache, start, HYBRID)
    theirs, ours = join_tokens(start, run_of(2, 60)), join_tokens(start, run_of(3, 60))
    serve(cache, theirs, HYBRID)
    serve(cache, ours, HYBRID)
    number = cache.order.policy.number_of(ours, namespace="")
    assert number is not None
    cache.expect(cache.match(join_tokens(start, run_of(4, 60))), number=number)
    left = {c.position: c.is_superseded for c in cache.tree.checkpoints() if c.node.last_visit != number}
    assert left == {160: False}


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_path_that_fills_the_budget_grows_by_taking_the_place_of_where_its_request_resumed(
    *, is_restored: bool
) -> None:
    cache = store("cost", HYBRID, 340)
    tokens = run_of(1, 300)
    assert serve(cache, tokens[:200], HYBRID) == 0
    lease = cache.lease(cache.match(tokens), 200)
    lease.is_restored = is_restored
    stored = cache.commit(tokens[:230], SizedSource(HYBRID, 1), kind=BoundaryKind.STABLE, number=lease.number)
    assert stored.is_resumable == is_restored
    cache.check()
    assert resumes_at(cache, tokens) == (230 if is_restored else 200)
    stored = cache.commit(tokens, SizedSource(HYBRID, 1), kind=BoundaryKind.STABLE, number=lease.number)
    assert not stored.is_resumable
    cache.release(lease)
    cache.check()
    assert resumes_at(cache, tokens) == (230 if is_restored else 200), "what does not fit takes nobody's place"


@pytest.mark.parametrize(
    ("kind", "position", "stable_at", "grows"),
    [
        (BoundaryKind.SYSTEM, 5, 300, True),
        (BoundaryKind.SYSTEM, 150, 300, False),
        (BoundaryKind.STABLE, 5, 5, False),
    ],
    ids=["passed", "worth more to others", "the chat may go on there"],
)
def test_a_path_that_fills_the_budget_grows_by_the_room_of_what_it_has_passed(
    kind: BoundaryKind, position: int, stable_at: int, *, grows: bool
) -> None:
    cache, tokens, source = store("cost", HYBRID, 440), run_of(1, 300), SizedSource(HYBRID, 1)
    serve(cache, tokens[:position], HYBRID, kind=kind)
    serve(cache, tokens[:200], HYBRID, kind=BoundaryKind.INTERVAL, stable_at=stable_at)
    lease = cache.lease(cache.match(tokens), 200)
    lease.is_restored = True
    stored = cache.commit(tokens[:260], source, kind=BoundaryKind.INTERVAL, number=lease.number, stable_at=stable_at)
    cache.release(lease)
    cache.check()
    assert stored.is_resumable == grows
    assert sorted(c.position for c in cache.tree.checkpoints()) == ([260] if grows else [position, 200])


@pytest.mark.parametrize(("stable_at", "is_superseded"), [(120, True), (100, False)])
def test_a_checkpoint_that_the_next_turn_repeats_supersedes_a_stable_one(
    *, stable_at: int, is_superseded: bool
) -> None:
    cache, tokens = store("cost", HYBRID, None), run_of(1, 110)
    serve(cache, tokens[:90], HYBRID)
    serve(cache, tokens, HYBRID, kind=BoundaryKind.INTERVAL, stable_at=stable_at)
    older = next(c for c in cache.tree.checkpoints() if c.position == 90)
    assert older.is_superseded == is_superseded


def test_a_turn_displaces_a_chat_for_what_it_adds_to_its_own() -> None:
    cache = store("cost", HYBRID, 510)
    know_enough(cache.order.policy)
    idle, growing = run_of(1, 200), run_of(2, 400)
    serve(cache, idle, HYBRID)
    serve(cache, growing[:100], HYBRID)
    serve(cache, growing[:120], HYBRID)
    assert resumes_at(cache, idle) == 200, "twenty tokens are computed again sooner than two hundred"
    serve(cache, growing[:390], HYBRID)
    assert resumes_at(cache, growing) == 390


@pytest.mark.parametrize(
    ("sizes", "cost"), [(HYBRID, 20), (Sizes(full=1, window=1, window_tokens=8), 120)], ids=["snapshot", "entries"]
)
def test_a_snapshot_is_worth_what_it_adds_and_entries_the_path_that_needs_them(sizes: Sizes, cost: int) -> None:
    cache, tokens = store("cost", sizes, None), run_of(1, 120)
    serve(cache, tokens[:100], sizes)
    kind = BoundaryKind.STABLE
    new = cache.order.new_candidate(
        cache.tree.walk(tokens, ""), 120, 50, kind=kind, stable_at=None, visit=None, is_auxiliary=False
    )
    assert new.cost == cost


def test_what_a_chat_has_passed_is_worth_what_others_use_of_it() -> None:
    policy = ExpectedSaving()
    for turn in range(1, 9):
        policy.arrive(run_of(1, 50 * turn), known=50 * (turn - 1), namespace="")
    tip, passed = candidate(last_visit=8, first_visit=1), candidate(last_visit=8, first_visit=1, is_passed=True)
    shared = candidate(last_visit=8, first_visit=1, is_passed=True, num_uses=5)
    assert policy.score(passed) < policy.score(tip)
    assert policy.score(passed) < policy.score(shared)


def test_a_system_prompt_counts_as_passed_while_the_chat_behind_it_is_stored() -> None:
    cache, tokens = store("cost", HYBRID, None), run_of(1, 100)
    serve(cache, tokens[:20], HYBRID, kind=BoundaryKind.SYSTEM)
    start = next(cache.tree.checkpoints())
    assert not cache.order.candidate(start).is_passed
    serve(cache, tokens[:60], HYBRID, kind=BoundaryKind.GENERATION_END, stable_at=40)
    assert not cache.order.candidate(start).is_passed, "the next turn may not repeat the answer"
    serve(cache, tokens, HYBRID)
    assert cache.order.candidate(start).is_passed
    cache.release(cache.lease(cache.match(join_tokens(tokens[:20], run_of(2, 50))), 20))
    assert not cache.order.candidate(start).is_passed, "the chat that came last has nothing further on"


def test_a_short_turn_is_no_reason_to_drop_a_long_chat_as_a_whole() -> None:
    policy = ExpectedSaving()
    know_enough(policy)
    long, turn = candidate(cost=1000, nbytes=1000), candidate(cost=20, nbytes=20)
    assert policy.score(turn) == policy.score(long)
    assert not policy.admits(turn, long, is_exact=False)
    assert policy.admits(turn, long, is_exact=True)
    assert policy.admits(long, turn, is_exact=False)
    assert policy.admits(turn, candidate(cost=1000, nbytes=1000, is_superseded=True), is_exact=False)


def test_what_is_believed_of_older_chats_keeps_nothing_new_out_until_something_is_known() -> None:
    policy = ExpectedSaving()
    admits: list[bool] = []
    for n in range(501):
        running, older = (candidate(cost=cost, last_visit=n) for cost in (20, 100))
        if n in (0, 1, 20, 500):
            admits.append(policy.admits(running, older, is_exact=False))
        title, left = candidate(is_auxiliary=True), candidate(is_superseded=True)
        assert policy.admits(title, left, is_exact=True), "what a chat left goes before a title"
        assert not policy.admits(title, older, is_exact=True), "and no chat does"
        policy.arrive(run_of(n, 40), known=0, namespace="")
    assert admits == [True, True, True, False]


@pytest.mark.parametrize("sizes", [HYBRID, Sizes(full=1)], ids=["snapshots", "full"])
def test_where_a_chat_is_lost_as_a_whole_a_short_turn_is_not_stored_instead(sizes: Sizes) -> None:
    cache = store("cost", sizes, None)
    know_enough(cache.order.policy)
    long, tokens = run_of(1, 2000), run_of(2, 300)
    serve(cache, long, sizes)
    serve(cache, tokens[:200], sizes)
    cache.memory.resize(cache.nbytes + 5)
    serve(cache, tokens[:240], sizes)
    if sizes == HYBRID:
        assert (resumes_at(cache, long), resumes_at(cache, tokens)) == (2000, 200)
    else:
        assert resumes_at(cache, long) > 1900, "only the end of it is lost"
        assert resumes_at(cache, tokens) == 240
    cache.check()


def test_what_is_pinned_is_not_replaced() -> None:
    cache = store("cost", HYBRID, 340)
    tokens = run_of(1, 300)
    assert serve(cache, tokens[:200], HYBRID) == 0
    assert cache.pin(tokens[:200], namespace="", until=float("inf"))
    assert serve(cache, tokens[:230], HYBRID) == 200
    assert resumes_at(cache, tokens) == 200
    cache.check()


def test_where_a_chat_resumes_once_its_tip_is_gone_is_no_longer_superseded() -> None:
    cache = store("cost", HYBRID, None)
    tokens = run_of(1, 300)
    for length in (100, 200, 300):
        cache.commit(tokens[:length], SizedSource(HYBRID, 1), kind=BoundaryKind.STABLE)
    superseded = {mark.position: mark for mark in cache.tree.checkpoints() if mark.is_superseded}
    assert sorted(superseded) == [100, 200]
    for length in (100, 200):
        assert cache.pin(tokens[:length], namespace="", until=float("inf"))
    assert cache.evict_one(), "the tip, since the others are pinned"
    assert [superseded[at].is_superseded for at in (100, 200)] == [True, False]
    cache.check()


def test_a_prompt_that_is_larger_than_the_budget_keeps_a_beginning_in_place_of_a_chat_that_has_ended() -> None:
    full = Sizes(full=1)
    cache = store("cost", full, 100)
    serve(cache, run_of(1, 95), full)
    long = run_of(2, 300)
    for _ in range(12):
        serve(cache, long, full)
    assert resumes_at(cache, long) >= 80


class BySavedPerByte(Lru):
    def score(self, candidate: EvictionCandidate) -> float:
        return candidate.cost / candidate.nbytes


def test_a_path_that_has_lost_its_end_is_worth_less_per_byte_from_then_on() -> None:
    window = Sizes(full=1, window=1, window_tokens=8)
    cache = PrefixCache(window.layout(), policy=BySavedPerByte())
    long, other = run_of(1, 40), run_of(2, 100)
    for tokens in (long[:20], long, other):
        cache.commit(tokens, SizedSource(window, 1), kind=BoundaryKind.SYSTEM)
        cache.compact_path(tokens)
    # Within a path a checkpoint takes 7 window entries; at its end also all that lies before it, up to the next one.
    kept: list[tuple[int, int]] = []
    while cache.evict_one():
        kept.append((resumes_at(cache, long), resumes_at(cache, other)))
        cache.check()
    assert kept == [(20, 100), (0, 100), (0, 0)]


@pytest.mark.parametrize(("num_others", "cost"), [(0, 200), (1, 100)])
def test_what_several_requests_resumed_from_is_counted_on_though_a_later_tip_supersedes_it(
    num_others: int, cost: int
) -> None:
    cache = store("cost", HYBRID, None)
    tokens = run_of(1, 200)
    serve(cache, tokens[:100], HYBRID, kind=BoundaryKind.PROMPT_END)
    for number in range(num_others):
        serve(cache, join_tokens(tokens[:100], run_of(2 + number, 10)), HYBRID, kind=BoundaryKind.SYSTEM)
    serve(cache, tokens, HYBRID, kind=BoundaryKind.PROMPT_END)
    costs = {checkpoint.position: candidate.cost for checkpoint, candidate in cache.would_evict(10)}
    assert costs[200] == cost


WINDOW = Sizes(full=1, window=1, window_tokens=20)


@pytest.mark.parametrize(("sizes", "distance"), [(WINDOW, 0), (WINDOW, 100), (HYBRID, 100)])
def test_a_long_chat_with_windows_loses_its_end_and_not_all_of_its_path(sizes: Sizes, distance: int) -> None:
    cache = PrefixCache(sizes.layout(), sizes=SegmentSizes(longest=64, tail=16, fallback=distance))
    chat = run_of(1, 40)
    for turn in range(20):
        serve(cache, chat, sizes)
        chat = join_tokens(chat, run_of(100 + turn, 30))
    know_enough(cache.order.policy)
    fallbacks = [mark for mark in cache.tree.checkpoints() if mark.is_fallback]
    assert all(cache.order.candidate(mark).cost >= distance for mark in fallbacks)
    resumed = [resumes_at(cache, chat)]
    while resumed[-1] > 0:
        assert cache.evict_one()
        cache.check()
        if resumes_at(cache, chat) < resumed[-1]:
            resumed.append(resumes_at(cache, chat))
    assert resumed == ([610, 580, 460, 340, 220, 100, 0] if distance and sizes is WINDOW else [610, 0])


def long_chat(*, room: int | None = None, kind: BoundaryKind = BoundaryKind.STABLE) -> tuple[PrefixCache, Tokens]:
    """A cache with windows in which a chat of 310 tokens falls back on 100 and 220; `room`: beside it, in bytes."""
    cache = PrefixCache(WINDOW.layout(), memory=Memory(None), sizes=SegmentSizes(longest=64, tail=16, fallback=100))
    know_enough(cache.order.policy)
    tokens = run_of(1, 310)
    for length in range(40, 311, 30):
        serve(cache, tokens[:length], WINDOW, kind=kind)
    assert fallbacks(cache) == [100, 220]
    cache.compact_path(tokens)
    if room is not None:
        while cache.would_evict(1)[0][1].is_superseded:
            assert cache.evict_one()
        cache.memory.resize(cache.nbytes + room)
    return cache, tokens


def fallbacks(cache: PrefixCache) -> list[int]:
    return sorted(mark.position for mark in cache.tree.checkpoints() if mark.is_fallback)


def test_a_chat_that_fills_the_budget_gives_up_what_it_would_fall_back_on() -> None:
    cache, tokens = long_chat(room=0)
    serve(cache, join_tokens(tokens, run_of(2, 10)), WINDOW)
    assert resumes_at(cache, join_tokens(tokens, run_of(2, 10))) == 320


@pytest.mark.parametrize(("num_new", "is_auxiliary"), [(10, True), (25, False), (2000, False)])
def test_what_is_not_stored_all_the_same_leaves_the_fallbacks(num_new: int, *, is_auxiliary: bool) -> None:
    cache, tokens = long_chat(room=0)
    serve(cache, join_tokens(tokens, run_of(2, num_new)), WINDOW, is_auxiliary=is_auxiliary)
    assert fallbacks(cache) == [100, 220]


def test_who_begins_like_a_chat_takes_none_of_its_fallbacks_further_on() -> None:
    cache, tokens = long_chat(room=0)
    serve(cache, join_tokens(tokens[:10], run_of(2, 10)), WINDOW)
    assert fallbacks(cache) == [100, 220]


def test_fallbacks_that_a_lease_or_pin_protects_are_not_given_up() -> None:
    cache, tokens = long_chat(room=0)
    assert cache.pin(tokens[:100], namespace="", until=float("inf"))
    assert cache.pin(tokens[:220], namespace="", until=float("inf"))
    serve(cache, join_tokens(tokens, run_of(2, 10)), WINDOW)
    assert fallbacks(cache) == [100, 220]


def test_what_a_chat_left_is_no_place_to_fall_back_on() -> None:
    cache, tokens = long_chat()
    number = cache.order.policy.number_of(tokens, namespace="")
    assert number is not None
    cache.expect(cache.match(join_tokens(tokens[:50], run_of(2, 30))), number=number)
    assert fallbacks(cache) == []


def test_what_lies_beside_the_settled_turn_is_no_place_to_fall_back_on() -> None:
    cache, tokens = long_chat()
    for mark in cache.tree.checkpoints():
        mark.stable_at = 50
    number = cache.order.policy.number_of(tokens, namespace="")
    settled = join_tokens(tokens[:50], run_of(2, 30))
    cache.commit(settled, SizedSource(WINDOW, 1), kind=BoundaryKind.STABLE, number=number)
    assert fallbacks(cache) == []


def test_a_row_that_goes_takes_no_fallback_with_it() -> None:
    cache, tokens = long_chat(kind=BoundaryKind.PROMPT_END)
    for at in (100, 220):
        cache.keep_row(tokens[:at], SizedSnapshot(8), namespace="")
    assert len(cache.rows) == 2
    while len(cache.rows) > 0:
        assert cache.evict_one()
    assert fallbacks(cache) == [100, 220]


def test_places_to_fall_back_on_are_judged_from_the_start_whatever_came_first() -> None:
    cache = PrefixCache(WINDOW.layout(), sizes=SegmentSizes(longest=64, tail=16, fallback=100))
    for length in (180, 120, 300):
        serve(cache, run_of(1, 300)[:length], WINDOW, kind=BoundaryKind.PROMPT_END)
    assert fallbacks(cache) == [120]


def test_where_a_chat_goes_on_again_is_no_fallback() -> None:
    cache = PrefixCache(WINDOW.layout(), sizes=SegmentSizes(longest=64, tail=16, fallback=100))
    for length in (200, 400, 200):
        serve(cache, run_of(1, 400)[:length], WINDOW)
        assert [mark.is_fallback for mark in cache.tree.checkpoints() if mark.position == 200] == [length == 400]
