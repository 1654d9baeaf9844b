"""A whole simulation: one pass over a trace for every policy and budget."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from reprise.core.errors import BadRequest
from reprise.lab.simulate.offline import FutureKnown
from reprise.replay.payloads import Sizes
from reprise.replay.policies import POLICIES
from reprise.replay.request import Change, Request
from reprise.replay.store import Replay

UNBOUNDED = "infinite"
BELADY = "belady"
KNOWN = (*POLICIES, UNBOUNDED, BELADY)
"""What can be compared: the policies, a store without a bound, and Belady's rule with the future known."""


@dataclass(slots=True, kw_only=True)
class ChangeTally:
    """The requests whose prompts changed in one way. `least`: the tokens that a store without a bound computes of them.

    `least` is None if that was not replayed.
    """

    change: str
    requests: int = 0
    prompt: int = 0
    computed: int = 0
    least: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy reused of a trace. `budget` in bytes; None: no bound. Tokens are the real prompts'."""

    trace: str
    policy: str
    budget: int | None
    requests: int
    prompt: int
    reused: int
    changes: tuple[ChangeTally, ...] = ()
    """By what prompts are to those before them, where the trace tells."""

    @property
    def computed(self) -> int:
        """Prompt tokens that were not reused."""
        return self.prompt - self.reused

    @property
    def hit_share(self) -> float:
        """Reused ÷ prompt tokens; 0 for an empty trace."""
        return self.reused / self.prompt if self.prompt > 0 else 0.0


def run_simulation(
    name: str,
    requests: Iterable[Request],
    *,
    budgets: tuple[int, ...],
    policies: tuple[str, ...] = ("lru", "cost", UNBOUNDED, BELADY),
    sizes: Sizes | None = None,
    settles: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> tuple[Result, ...]:
    """Replay the requests of one trace. Budgets in bytes; `on_progress` gets the number of requests done, and
    `on_stage` the name of each step after the last request. `settles`: compute what is known of the next turn while
    nobody waits.

    The requests are read once and not kept, except for `belady`, which needs 8 bytes for each block of each prompt, and
    `infinite`, whose store keeps all. Raises BadRequest for a policy that does not exist, and for a trace that has both
    block hashes, replayed as one token each, and token prompts.
    """
    unknown = [policy for policy in policies if policy not in KNOWN]
    if unknown:
        raise BadRequest(f"Unknown policy {unknown[0]!r}. Choose from {', '.join(KNOWN)}.")
    sizes = sizes if sizes is not None else Sizes()
    stream = iter(requests)
    first = next(stream, None)
    if first is None:
        raise BadRequest(f"{name} contains no requests.")
    bounded = [(policy, budget) for budget in budgets for policy in policies if policy in POLICIES]
    unbounded = [("lru", None)] if UNBOUNDED in policies else []
    replays = [
        (policy, budget, Replay(policy=policy, budget=budget, sizes=sizes, unit=first.unit, settles=settles))
        for policy, budget in (*bounded, *unbounded)
    ]
    changes: list[dict[str, ChangeTally]] = [{} for _ in replays]
    future = FutureKnown(block=first.block) if BELADY in policies else None
    num = prompt = 0
    for request in chain((first,), stream):
        if request.unit != first.unit:
            raise BadRequest(
                f"{name}, request {num + 1}: a trace with both block hashes and token prompts needs "
                "--granularity token."
            )
        reused = [replay.take(request) for _, _, replay in replays]
        if request.change is not None:
            least = request.num_tokens - reused[-1] if unbounded else None
            for tallies, each in zip(changes, reused, strict=True):
                _count(tallies, request, request.num_tokens - each, least)
        if future is not None:
            future.add(request)
            if settles:
                future.add_settled(request)
        num += 1
        prompt += request.num_tokens
        on_progress(num)

    def result(policy: str, budget: int | None, reused: int, tallies: dict[str, ChangeTally]) -> Result:
        counted = tuple(tallies[change] for change in Change if change in tallies)
        return Result(
            trace=name, policy=policy, budget=budget, requests=num, prompt=prompt, reused=reused, changes=counted
        )

    results = [
        result(policy if budget is not None else UNBOUNDED, budget, replay.tally.reused, tallies)
        for (policy, budget, replay), tallies in zip(replays, changes, strict=True)
    ]
    if future is not None:
        for budget in budgets:
            on_stage(f"upper bound (future known) at {budget // sizes.full:,} tokens")
            most = future.reused_within(budget // sizes.full, snapshot_tokens=sizes.snapshot // sizes.full)
            results.append(result(BELADY, budget, most, {}))
    order = list(policies)
    return tuple(sorted(results, key=lambda r: (r.budget is None, r.budget or 0, order.index(r.policy))))


def _count(tallies: dict[str, ChangeTally], request: Request, computed: int, least: int | None) -> None:
    assert request.change is not None
    tally = tallies.setdefault(request.change, ChangeTally(change=request.change))
    tally.requests += 1
    tally.prompt += request.num_tokens
    tally.computed += computed
    tally.least = None if least is None else least + (tally.least or 0)
