"""Replays a trace over several replicas behind a router.

A trace has no times. The work of a request is the number of tokens computed and generated; between two requests, every
replica processes as much work as keeps it busy half of the time. Its remaining work is its queue.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from reprise.core.errors import BadRequest
from reprise.core.tokens import Tokens
from reprise.replay.payloads import Sizes
from reprise.replay.request import Request
from reprise.replay.store import Replay

_BUSY = 0.5
_TEXT_BLOCK = 16
"""Block size in tokens of a router that compares texts."""
_ALIKE = 0.3
"""The share of a prompt that a replica must have seen to be preferred (smg's default)."""
_MOST_BEHIND = 2
"""How many requests longer than the shortest queue a preferred replica's queue may be."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server: its cache, its queue in tokens, and counters."""

    replay: Replay
    queue: float = 0.0
    num_computed: int = 0
    work: float = 0.0
    seen: set[int] = field(default_factory=set[int])
    """Hashes of the prefixes sent here, for the router that compares texts."""

    def num_known(self, request: Request) -> int:
        """Real tokens of the prompt that it would reuse."""
        cache = self.replay.cache
        return cache.lookup(request.prompt.tokens, len(request.prompt)).position * request.unit


Router = Callable[[Request, Sequence[Replica]], Replica]


def _random() -> Router:
    random = Random(0)
    return lambda request, replicas: random.choice(replicas)


def _round_robin() -> Router:
    num = -1

    def route(request: Request, replicas: Sequence[Replica]) -> Replica:
        nonlocal num
        num += 1
        return replicas[num % len(replicas)]

    return route


def _shortest(replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.queue, replica.work))


def _text() -> Router:
    """Route to the replica that got the longest prefix of the text before, otherwise to the shortest queue."""
    num = 0

    def route(request: Request, replicas: Sequence[Replica]) -> Replica:
        nonlocal num
        beginnings, shortest = _beginnings(request), _shortest(replicas)
        num_alike = [_num_leading(beginnings, replica.seen) for replica in replicas]
        most = max(num_alike)
        alike = _shortest([replica for replica, each in zip(replicas, num_alike, strict=True) if each == most])
        behind = _MOST_BEHIND * sum(replica.work for replica in replicas) / max(1, num)
        is_there = most > _ALIKE * len(beginnings) and alike.queue <= shortest.queue + behind
        chosen = alike if is_there else shortest
        chosen.seen.update(beginnings)
        num += 1
        return chosen

    return route


def _beginnings(request: Request) -> list[int]:
    """Hashes of the prompt's prefixes, each a block longer."""
    tokens: Tokens = request.prompt.tokens
    step, found, before = max(1, _TEXT_BLOCK // request.unit), list[int](), 0
    for at in range(0, len(tokens) - step + 1, step):
        before = hash((before, tokens[at : at + step].tobytes()))
        found.append(before)
    return found


def _num_leading(beginnings: Sequence[int], seen: set[int]) -> int:
    return next((num for num, each in enumerate(beginnings) if each not in seen), len(beginnings))


def _lookup() -> Router:
    """Route to the replica with the lowest queue plus tokens to compute, where the latter count twice.

    Twice, because later requests wait for them too.
    """

    def cost(replica: Replica, request: Request) -> float:
        return replica.queue + 2 * (request.num_tokens - replica.num_known(request))

    return lambda request, replicas: min(replicas, key=lambda replica: (cost(replica, request), replica.work))


ROUTINGS: dict[str, Callable[[], Router]] = {
    "random": _random,
    "round-robin": _round_robin,
    "text": _text,
    "lookup": _lookup,
}


_LOOKS_AT_QUEUES = frozenset({"text", "lookup"})
"""Routings that depend on the queues, which a shared store changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """The result of replaying a trace. `budget`: of one replica, in bytes. Tokens are real tokens."""

    trace: str
    num_replicas: int
    routing: str
    is_shared: bool
    """Whether all replicas read what any of them has computed from an unlimited shared store."""
    budget: int
    requests: int
    prompt: int
    computed: int
    loaded: int
    """Tokens read from the shared store because the replica lacked them."""
    balance: float
    """The work of the busiest replica ÷ the mean; 1 is best."""

    @property
    def computed_share(self) -> float:
        return self.computed / self.prompt


def _tier(requests: Sequence[Request], sizes: Sizes) -> list[int]:
    """How many tokens of each request the shared store has, whatever the routing of earlier requests."""
    unit = requests[0].unit if requests else 1
    tier = Replay(policy="lru", budget=None, sizes=sizes, unit=unit)
    return [tier.take(request) for request in requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """The replica that a request went to, and how many of its tokens were cached there."""

    replica: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """A trace and the replicas that it is replayed over."""

    name: str
    requests: Sequence[Request]
    num_replicas: int
    budget: int
    sizes: Sizes

    def visits(self, routing: str, tier: Sequence[int] | None) -> list[_Visit]:
        """Replay the trace. Raises BadRequest for an unknown routing or an empty trace."""
        if routing not in ROUTINGS:
            raise BadRequest(f"Unknown routing {routing!r}: choose from {', '.join(ROUTINGS)}.")
        if not self.requests:
            raise BadRequest(f"{self.name} contains no requests.")
        unit = self.requests[0].unit
        replicas = [
            Replica(Replay(policy="cost", budget=self.budget, sizes=self.sizes, unit=unit))
            for _ in range(self.num_replicas)
        ]
        number = {id(replica): at for at, replica in enumerate(replicas)}
        route, work, visits = ROUTINGS[routing](), 0.0, list[_Visit]()
        for num, request in enumerate(self.requests):
            spent = work / max(1, num) / self.num_replicas / _BUSY
            for replica in replicas:
                replica.queue = max(0.0, replica.queue - spent)
            replica = route(request, replicas)
            visits.append(_Visit(replica=number[id(replica)], held=replica.replay.take(request)))
            effort = _effort(request, visits[-1], tier[num] if tier is not None else 0)
            replica.queue, replica.work, work = replica.queue + effort, replica.work + effort, work + effort
        return visits

    def result(self, visits: Sequence[_Visit], routing: str, tier: Sequence[int] | None) -> ClusterResult:
        """The result of these visits."""
        works, computed, loaded = [0.0] * self.num_replicas, 0, 0
        for num, (request, visit) in enumerate(zip(self.requests, visits, strict=True)):
            found = max(visit.held, tier[num] if tier is not None else 0)
            works[visit.replica] += _effort(request, visit, found)
            computed, loaded = computed + request.num_tokens - found, loaded + found - visit.held
        return ClusterResult(
            trace=self.name,
            num_replicas=self.num_replicas,
            routing=routing,
            is_shared=tier is not None,
            budget=self.budget,
            requests=len(self.requests),
            prompt=sum(request.num_tokens for request in self.requests),
            computed=computed,
            loaded=loaded,
            balance=max(works) * self.num_replicas / sum(works),
        )


def _effort(request: Request, visit: _Visit, in_tier: int) -> float:
    """The tokens computed and generated."""
    return request.num_tokens - max(visit.held, in_tier) + (request.answer_length or 0.0) * request.unit


def compare_clusters(
    name: str,
    requests: Iterable[Request],
    *,
    replicas: Sequence[int],
    budgets: Sequence[int],
    sizes: Sizes,
    routings: Sequence[str] = tuple(ROUTINGS),
    on_stage: Callable[[str], None] = lambda stage: None,
) -> list[ClusterResult]:
    """Results of every routing with and without a shared store, each after one server with all their memory."""
    kept = list(requests)
    results: list[ClusterResult] = []
    on_stage("the shared store")
    tier = _tier(kept, sizes)
    for budget in budgets:
        for num in replicas:
            on_stage(f"one server with the memory of {num}")
            alone = _Trial(name=name, requests=kept, num_replicas=1, budget=num * budget, sizes=sizes)
            results.append(alone.result(alone.visits("random", None), "random", None))
            trial = _Trial(name=name, requests=kept, num_replicas=num, budget=budget, sizes=sizes)
            for routing in routings:
                on_stage(f"{num} replicas, {routing}")
                visits = trial.visits(routing, None)
                results.append(trial.result(visits, routing, None))
                if routing in _LOOKS_AT_QUEUES:
                    visits = trial.visits(routing, tier)
                results.append(trial.result(visits, routing, tier))
    return results
