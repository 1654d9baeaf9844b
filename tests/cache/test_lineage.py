"""What requests tell of other chats: ended sub-agents, waiting parents, and requests that belong to no chat."""

import itertools

import pytest

from reprise.cache.node import SegmentSizes
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.job import EndedChat, Lineage
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, join_tokens
from reprise.memory import Memory
from reprise.replay.payloads import SizedSource, Sizes
from tests.cache.test_reuse_rate import run_of

FULL, HYBRID = Sizes(full=1), Sizes(full=1, snapshot=30)
TRUNK = 60


class CacheOfJobs:
    """A cache of `room` bytes, and requests to it with the ids of their jobs."""

    def __init__(self, sizes: Sizes, room: int) -> None:
        self.sizes = sizes
        self.cache = PrefixCache(sizes.layout(), memory=Memory(room), sizes=SegmentSizes(longest=64, tail=16))

    def ask(
        self, job_id: str, tokens: Tokens, lineage: Lineage | None = None, *, trunk_at: int = 0, namespace: str = ""
    ) -> None:
        cache = self.cache
        match = cache.match(tokens, namespace=namespace)
        resume_at = cache.resume_at(match, limit=len(tokens) - 1)
        lease = cache.lease(match, resume_at)
        cache.note_lineage(job_id, lease, lineage or Lineage(), trunk_at=trunk_at, namespace=namespace)
        is_auxiliary = lineage is not None and lineage.is_side
        for position, kind in ((trunk_at, BoundaryKind.SYSTEM), (len(tokens), BoundaryKind.STABLE)):
            if position > resume_at and (self.sizes.snapshot > 0 or kind is BoundaryKind.STABLE):
                source = SizedSource(self.sizes, 1)
                cache.commit(tokens[:position], source, kind=kind, namespace=namespace, is_auxiliary=is_auxiliary)
        cache.release(lease)
        cache.check()

    def held(self, tokens: Tokens, *, namespace: str = "") -> int:
        return self.cache.resume_at(self.cache.match(tokens, namespace=namespace), limit=len(tokens))

    def evict(self, nbytes: int) -> None:
        for _ in itertools.takewhile(lambda _: self.cache.nbytes > nbytes, itertools.count()):
            assert self.cache.evict_one()
            self.cache.check()


def ended(*jobs: str) -> Lineage:
    return Lineage(ended=tuple(EndedChat(first_job=job, last_job=job) for job in jobs))


@pytest.mark.parametrize("sizes", [FULL, HYBRID])
def test_the_tail_of_a_sub_agent_that_has_ended_goes_first_and_its_trunk_stays(sizes: Sizes) -> None:
    chats = CacheOfJobs(sizes, 10_000)
    parent, child, other = run_of(1, 200), run_of(2, 200), run_of(3, 200)
    chats.ask("other", other)
    chats.ask("parent", parent, trunk_at=TRUNK)
    for n in range(20):
        chats.ask(f"later-{n}", run_of(100 + n, 200))
    chats.ask("child", child, trunk_at=TRUNK)
    parent = join_tokens(parent, run_of(4, 20))
    chats.ask("parent-2", parent, ended("child"), trunk_at=TRUNK)
    before = chats.cache.nbytes
    chats.evict(before - (140 + sizes.snapshot))
    assert (chats.held(parent), chats.held(other), chats.held(child)) == (220, 200, TRUNK)


@pytest.mark.parametrize("sizes", [FULL, HYBRID])
def test_what_another_chat_brought_here_does_not_end_with_a_sub_agent(sizes: Sizes) -> None:
    chats = CacheOfJobs(sizes, 10_000)
    theirs = run_of(1, 200)
    chats.ask("theirs", theirs)
    chats.ask("forged", theirs)
    newer = run_of(2, 200)
    chats.ask("newer", newer)
    chats.ask("end", run_of(3, 20), ended("forged"))
    candidates = [candidate for _, candidate in chats.cache.would_evict(10)]
    assert not any(candidate.has_ended for candidate in candidates)


def test_an_id_means_nothing_in_another_namespace() -> None:
    chats = CacheOfJobs(FULL, 10_000)
    chats.ask("theirs", run_of(1, 200), namespace="a")
    chats.ask("end", run_of(2, 20), Lineage(ended=ended("theirs", "nobody").ended, awaited=("theirs",)), namespace="b")
    candidates = [candidate for _, candidate in chats.cache.would_evict(10)]
    assert not any(candidate.has_ended or candidate.alive_at is not None for candidate in candidates)


def test_a_sub_agent_that_asks_again_has_not_ended() -> None:
    chats = CacheOfJobs(HYBRID, 10_000)
    child = run_of(2, 200)
    chats.ask("child", child)
    chats.ask("parent", run_of(1, 50), ended("child"))
    chats.ask("child-2", join_tokens(child, run_of(3, 10)))
    assert not any(candidate.has_ended for _, candidate in chats.cache.would_evict(10))


@pytest.mark.parametrize("sizes", [FULL, HYBRID])
@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_parent_that_waits_for_sub_agents_keeps_its_path(sizes: Sizes, *, is_awaited: bool) -> None:
    chats = CacheOfJobs(sizes, 1000)
    parent, child = run_of(1, 300), run_of(2, 100)
    chats.ask("parent", parent)
    for n in range(40):
        child = join_tokens(child, run_of(100 + n, 5))
        chats.ask(f"child-{n}", child, Lineage(awaited=("parent",) if is_awaited else ()))
        chats.ask(f"other-{n}", run_of(1000 + n, 100))
    assert (chats.held(parent) == 300) is is_awaited


def test_a_request_that_belongs_to_no_chat_never_pushes_one_out() -> None:
    chats = CacheOfJobs(FULL, 400)
    chat, small = run_of(1, 300), run_of(2, 90)
    chats.ask("chat", chat)
    for n in range(50):
        chats.ask(f"title-{n}", run_of(100 + n, 150), Lineage(is_side=True))
    assert chats.held(chat) == 300
    chats.ask("small", small)
    assert (chats.held(chat), chats.held(small)) == (300, 90), "and gives way to one"


def score_of_what_is_left(*earlier: Tokens, at: int) -> float:
    """Of the end of the last of these chats, once another prompt has left its path at this position and continued."""
    chats = CacheOfJobs(HYBRID, 10_000)
    for number, prompt in enumerate(earlier):
        chats.ask(f"earlier-{number}", prompt)
    leaving = join_tokens(earlier[-1][:at], run_of(2, 150))
    # As the server stores it: first where the prompt leaves what is there, within the other's edge.
    number = len(earlier) + 1
    chats.cache.commit(leaving[:at], SizedSource(HYBRID, 1), kind=BoundaryKind.BRANCH, number=number)
    chats.ask("leaving", leaving)
    chats.ask("leaving-2", join_tokens(leaving, run_of(3, 20)))
    score = chats.cache.order.policy.score
    (end,) = [each for checkpoint, each in chats.cache.would_evict(10) if checkpoint.position == len(earlier[-1])]
    return score(end)


def test_a_chat_that_leaves_another_one_early_and_continues_leaves_nothing_of_that_one_behind() -> None:
    assert score_of_what_is_left(run_of(1, 200), at=7) > 0, "nothing says that it has continued"


def test_what_a_chat_has_edited_away_has_continued_elsewhere_once_the_chat_goes_on() -> None:
    assert score_of_what_is_left(run_of(1, 60), run_of(1, 200), at=90) < 0, "nobody comes back to it"
