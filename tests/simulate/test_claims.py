"""What many chats in little memory must show, in exact counts and at a size that tests can afford.

The proportions are those of a hybrid model of 35 billion parameters: a snapshot has the bytes of 3,100 tokens of KV.
"""

from collections.abc import Iterator

import pytest

from bench.made_traces import Shape, chats_in_turn
from reprise.cache.node import Checkpoint, subtree
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Tokens, join_tokens
from reprise.replay.payloads import Sizes
from reprise.replay.policies import POLICIES
from reprise.replay.request import Request
from reprise.replay.store import Replay
from tests.cache.test_reuse_rate import run_of

KV = 20_480
SNAPSHOT = 3_100 * KV
SIZES = Sizes(full=KV, snapshot=SNAPSHOT)
GB = 10**9


def computed(policy: str, budget: int | None, *, num_chats: int, num_turns: int, shape: Shape, settles: bool) -> Replay:
    replay = Replay(policy=policy, budget=budget, sizes=SIZES, settles=settles)
    for request in chats_in_turn(num_chats=num_chats, num_turns=num_turns, shape=shape):
        replay.take(request)
        assert budget is None or replay.cache.nbytes <= budget
    replay.cache.check()
    return replay


@pytest.mark.matrix
@pytest.mark.parametrize(("thinking", "settles"), [(150, True), (0, False), (0, True), (150, False)])
def test_32_chats_in_turn_in_8_gb_compute_what_infinite_memory_computes(thinking: int, settles: bool) -> None:
    shape = Shape(thinking=thinking)
    bounded = computed("cost", 8 * GB, num_chats=32, num_turns=5, shape=shape, settles=settles)
    unbounded = computed("cost", None, num_chats=32, num_turns=5, shape=shape, settles=settles)
    assert bounded.cache.stats.num_evictions > 0
    assert bounded.tally.computed == unbounded.tally.computed


@pytest.mark.matrix
def test_16_chats_in_turn_in_2_gb_compute_at_most_a_tenth_on_the_path() -> None:
    shape = Shape(system=1000, user=100, answer=200, thinking=150)
    ours = computed("cost", 2 * GB, num_chats=16, num_turns=10, shape=shape, settles=True)
    assert ours.tally.computed <= 0.09 * ours.tally.prompt
    lru = computed("lru", 2 * GB, num_chats=16, num_turns=10, shape=shape, settles=True)
    assert lru.tally.computed > 5 * ours.tally.computed


def test_under_pressure_an_idle_chat_keeps_two_snapshots_at_most() -> None:
    num_chats = 12
    replay = computed("cost", None, num_chats=num_chats, num_turns=6, shape=Shape(thinking=80), settles=False)
    cache = replay.cache
    assert cache.stats.num_checkpoints > 4 * num_chats, "while there is room, all stay"
    assert _num_newest(replay) == num_chats
    held: list[int] = []
    while _num_newest(replay) == num_chats:
        held.append(cache.stats.num_checkpoints)
        assert any(mark.kind is BoundaryKind.SYSTEM for mark in _checkpoints(replay))
        assert cache.evict_one()
    cache.check()
    assert held[-1] <= 2 * num_chats + 1, "before a chat loses its newest turn, all the others have gone"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [Sizes(full=KV), SIZES, Sizes(full=KV // 2, window=KV // 2, window_tokens=64)])
def test_a_chat_its_branches_and_parallel_requests_are_held_once(policy: str, sizes: Sizes) -> None:
    replay = Replay(policy=policy, budget=None, sizes=sizes)
    unique: set[bytes] = set()

    def take(tokens: Tokens, answer: Tokens) -> None:
        whole = join_tokens(tokens, answer)
        unique.update(whole[:stop].tobytes()[-64:] + stop.to_bytes(4) for stop in range(1, len(whole) + 1))
        marks = (Boundary(len(tokens) - 4, BoundaryKind.STABLE),)
        prompt = Prompt(tokens=tokens, boundaries=marks)
        replay.take(Request(prompt=prompt, num_tokens=len(tokens), shareable=len(tokens), answer=answer))

    chat = run_of(0, 300)
    for turn in range(1, 9):
        answer = run_of(1000 + turn, 60)
        take(chat, answer)
        chat = join_tokens(chat, answer, run_of(2000 + turn, 40))
    for branch in range(5):
        take(join_tokens(chat[:700], run_of(3000 + branch, 90)), run_of(4000 + branch, 50))
    for parallel in range(6):
        take(chat, run_of(5000 + parallel, 70))
    stats = replay.cache.stats
    assert stats.num_tokens == len(unique)
    assert stats.kv_nbytes <= 1.1 * len(unique) * KV
    snapshots = sum(mark.snapshot is not None for mark in _checkpoints(replay))
    assert replay.cache.nbytes <= 1.1 * len(unique) * KV + snapshots * sizes.snapshot


def _num_newest(replay: Replay) -> int:
    return sum(mark.kind is BoundaryKind.STABLE and not mark.is_superseded for mark in _checkpoints(replay))


def _checkpoints(replay: Replay) -> Iterator[Checkpoint]:
    for root in replay.cache.tree.roots.values():
        for node in subtree(root):
            yield from node.checkpoints.values()


def test_a_replay_knows_how_long_a_chat_is_silent_and_where_windows_fall_back() -> None:
    replay = Replay(policy="cost", budget=None, sizes=Sizes(full=2, window=1, window_tokens=64))
    assert replay.cache.tree.sizes.fallback == 16 * 64 // 2
    prompt = Prompt(tokens=run_of(1, 100))
    asked = Request(prompt=prompt, num_tokens=100, shareable=100, num_answered=5, calls_tool=True, at_s=100, took_s=5)
    replay.take(asked)
    policy = replay.cache.order.policy
    assert [list(policy.fall_silent(now_s)) for now_s in (106, 107)] == [[], [1]]
