"""Traces made from nothing: the ways in which chats share a cache, to judge a policy where no trace is at hand."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.replay.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a chat's parts, in tokens.

    `opening` ends the prompt and `thinking` begins the answer; neither is part of the next prompt.
    """

    system: int = 2000
    user: int = 200
    answer: int = 300
    opening: int = 4
    thinking: int = 0


@dataclass(slots=True)
class _Random:
    """The only source of tokens: two draws are never alike."""

    numbers: np.random.Generator

    def tokens(self, num: int) -> Tokens:
        return as_tokens(self.numbers.integers(0, 1 << 31, size=num, dtype=np.int64).astype(np.int32))


@dataclass(slots=True)
class SimulatedChat:
    """A conversation that grows by a turn each time it is asked."""

    system: Tokens
    shape: Shape
    random: _Random
    history: list[Tokens] = field(default_factory=list[Tokens])

    def ask(self) -> Request:
        """The next turn: the request, with its answer as it was generated."""
        self.history.append(self.random.tokens(self.shape.user))
        lasting = join_tokens(self.system, *self.history)
        tokens = join_tokens(lasting, self.random.tokens(self.shape.opening))
        last_user_at = len(lasting) - self.shape.user
        answer = self.random.tokens(self.shape.answer)
        generated = join_tokens(self.random.tokens(self.shape.thinking), answer)
        self.history.append(answer)
        marks = {
            Boundary(len(self.system), BoundaryKind.SYSTEM),
            Boundary(last_user_at, BoundaryKind.LAST_USER),
            Boundary(len(lasting), BoundaryKind.STABLE),
        }
        prompt = Prompt(tokens=tokens, boundaries=tuple(sorted(mark for mark in marks if mark.position > 0)))
        return Request(
            prompt=prompt,
            num_tokens=len(tokens),
            shareable=len(tokens),
            answer=generated,
            next_known=join_tokens(lasting, answer),
        )


def chats_in_turn(*, num_chats: int, num_turns: int, shape: Shape | None = None, seed: int = 0) -> Iterator[Request]:
    """Turn 1 of each chat, turn 2 of each, …, all with one system prompt."""
    chats = _chats(num_chats, shape, seed)
    for _ in range(num_turns):
        for chat in chats:
            yield chat.ask()


def zipf_chats(*, num_requests: int, num_chats: int, shape: Shape | None = None, seed: int = 0) -> Iterator[Request]:
    """Some chats are asked much more often than others; each begins anew after 20 turns."""
    chats = _chats(num_chats, shape, seed)
    numbers = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, num_chats + 1)
    for at in numbers.choice(num_chats, size=num_requests, p=weights / weights.sum()):
        chat = chats[int(at)]
        if len(chat.history) >= 40:
            chat.history.clear()
        yield chat.ask()


def chats_among_scans(*, num_requests: int, num_chats: int, seed: int = 0) -> Iterator[Request]:
    """Every second request is a long prompt that is sent once; the others are of chats in random order."""
    chats = _chats(num_chats, None, seed)
    random = _Random(np.random.default_rng(seed + 1))
    for at in range(num_requests):
        if at % 2 == 0:
            tokens = random.tokens(6000)
            yield Request(prompt=Prompt(tokens=tokens), num_tokens=len(tokens), shareable=len(tokens))
        else:
            chat = chats[int(random.numbers.integers(num_chats))]
            if len(chat.history) >= 40:
                chat.history.clear()
            yield chat.ask()


def agent_loops(*, num_loops: int, num_steps: int, at_once: int, seed: int = 0) -> Iterator[Request]:
    """Tool loops that run one after the other, `at_once` side by side, and are then never seen again."""
    shape = Shape(system=6000, user=800, answer=150)
    system = _Random(np.random.default_rng(seed)).tokens(shape.system)
    random = _Random(np.random.default_rng(seed + 1))
    for _ in range(0, num_loops, at_once):
        loops = [SimulatedChat(system, shape, random) for _ in range(at_once)]
        for _ in range(num_steps):
            for loop in loops:
                yield loop.ask()


def bursty_agents(*, num_requests: int, num_agents: int, seed: int = 0) -> Iterator[Request]:
    """Agents that work in bursts, three at a time: short calls of tools that follow each other, ended by a long answer.

    Then an agent sleeps until it is woken up at random. A short answer means that its next request follows at once.
    """
    numbers = np.random.default_rng(seed)
    random = _Random(np.random.default_rng(seed + 1))
    system = random.tokens(4000)
    agents = [SimulatedChat(system, Shape(user=150), random) for _ in range(num_agents)]
    awake: list[int] = []
    for _ in range(num_requests):
        while len(awake) < 3:
            woken = int(numbers.integers(num_agents))
            if woken not in awake:
                awake.append(woken)
        at = int(numbers.integers(len(awake)))
        agent = agents[awake[at]]
        is_last = numbers.random() < 0.15
        agent.shape = Shape(user=150, answer=600 if is_last else int(numbers.integers(10, 60)))
        if len(agent.history) >= 80:
            agent.history.clear()
        yield agent.ask()
        if is_last:
            del awake[at]


def long_tail_chats(*, num_requests: int, seed: int = 0) -> Iterator[Request]:
    """Thinking chats that begin all the time: most are over after a turn or two, and few go on for very long.

    Pauses are lognormal about 30 requests long, and a longer chat is likelier to continue.
    """
    numbers = np.random.default_rng(seed)
    random = _Random(np.random.default_rng(seed + 1))
    system = random.tokens(500)
    due: list[tuple[int, int, SimulatedChat]] = []
    for now in range(num_requests):
        chat = heapq.heappop(due)[2] if due and due[0][0] <= now else SimulatedChat(system, Shape(), random)
        answer, thinking = (int(size) for size in np.clip(numbers.lognormal(5.3, 0.8, 2), 5, 3000))
        chat.shape = Shape(user=int(numbers.integers(20, 800)), answer=answer, thinking=thinking)
        yield chat.ask()
        num_turns = len(chat.history) // 2
        if numbers.random() < num_turns / (num_turns + 0.8):
            heapq.heappush(due, (now + 1 + int(numbers.lognormal(3.4, 1.0)), now, chat))


def uniform_documents(*, num_requests: int, num_documents: int, seed: int = 0) -> Iterator[Request]:
    """Questions about documents, each as likely as any other: no policy can know more than another."""
    random = _Random(np.random.default_rng(seed))
    documents = [random.tokens(3000) for _ in range(num_documents)]
    for _ in range(num_requests):
        document = documents[int(random.numbers.integers(num_documents))]
        tokens = join_tokens(document, random.tokens(100))
        marks = (Boundary(len(document), BoundaryKind.EXPLICIT), Boundary(len(tokens) - 4, BoundaryKind.STABLE))
        yield Request(prompt=Prompt(tokens=tokens, boundaries=marks), num_tokens=len(tokens), shareable=len(tokens))


def _chats(num: int, shape: Shape | None, seed: int) -> list[SimulatedChat]:
    shape = shape if shape is not None else Shape()
    random = _Random(np.random.default_rng(seed))
    system = random.tokens(shape.system)
    return [SimulatedChat(system, shape, random) for _ in range(num)]


WORKLOADS: dict[str, Callable[[], Iterator[Request]]] = {
    "chats-in-turn": lambda: chats_in_turn(num_chats=48, num_turns=15),
    "zipf-chats": lambda: zipf_chats(num_requests=1500, num_chats=200),
    "chats-among-scans": lambda: chats_among_scans(num_requests=1500, num_chats=24),
    "agent-loops": lambda: agent_loops(num_loops=60, num_steps=20, at_once=4),
    "bursty-agents": lambda: bursty_agents(num_requests=1500, num_agents=40),
    "long-tail-chats": lambda: long_tail_chats(num_requests=1500),
    "uniform-documents": lambda: uniform_documents(num_requests=1500, num_documents=60),
}
"""Small instances, for tests and benchmarks."""
