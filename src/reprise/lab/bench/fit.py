"""How much can be asked in the time there is: what a side computes in a second, and the size that follows."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from reprise.lab.bench.client import ClientReply, Post
from reprise.lab.bench.words import WORD_CHARS, text
from reprise.lab.bench.workloads import Restart, Size, Workload

_SIZES = tuple(Size(factor=float(f"{0.06 * 1.25**step:.3g}")) for step in range(26))
"""Sizes that are tried. Below the least a workload shows nothing."""
_USED = 0.8
"""Of the time there is: what is measured is not what was predicted."""
_USED_CONTEXT = 0.85
_REQUEST_S = 0.02
_MOST_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSpeed:
    """Of one side, measured. Tokens in a second; `start_s`: what starting it takes."""

    prefill: float
    decode: float
    chars_per_token: float
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a workload of some size asks for: characters of all prompts and of the longest, tokens to generate."""

    num_requests: int
    num_chars: int
    most_chars: int
    num_generated: int
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What is held: workloads of this size, so often."""

    size: Size
    num_repeats: int
    workloads: tuple[Workload, ...]


@cache
def demand_of(workload: Workload, size: Size) -> Demand:
    """The workload, held with a server that answers at once."""
    source = Random(0)
    script = workload.script(size, source)
    posts: list[Post] = []
    num_restarts = 0
    replies: list[ClientReply] = []
    step = next(script)
    while True:
        if isinstance(step, Restart):
            num_restarts += 1
            replies = []
        else:
            posts.extend(step)
            replies = [_made_up(source, size) for _ in step]
        try:
            step = script.send(replies)
        except StopIteration:
            break
    return Demand(
        num_requests=len(posts),
        num_chars=sum(post.num_chars for post in posts),
        most_chars=max(post.num_chars for post in posts),
        num_generated=size.max_tokens * len(posts),
        num_restarts=num_restarts,
    )


def seconds_of(demand: Demand, speed: SideSpeed) -> float:
    """What it takes a side that computes every prompt from its beginning."""
    prefill_s = demand.num_chars / speed.chars_per_token / speed.prefill
    decode_s = demand.num_generated / speed.decode
    return prefill_s + decode_s + _REQUEST_S * demand.num_requests + speed.start_s * demand.num_restarts


def fitted(
    workloads: Sequence[Workload], speeds: Mapping[str, SideSpeed], *, seconds: float, context: int | None
) -> Fit:
    """The largest size, most repeats first, that takes all sides together no longer than this.

    Where the time is too short for anything, it is the smallest, once, and the clock ends it.
    """
    without = tuple(workload for workload in workloads if not workload.restarts)
    plans = [(tuple(workloads), num) for num in range(_MOST_REPEATS, 0, -1)]
    plans += [(without, num) for num in (2, 1) if without and len(without) < len(workloads)]
    for chosen, num in plans:
        too_large = bisect_left(
            _SIZES,
            True,
            key=lambda size: not _fits(chosen, size, speeds, num, seconds=seconds, context=context),
        )
        if too_large > 0:
            return Fit(size=_SIZES[too_large - 1], num_repeats=num, workloads=chosen)
    return Fit(size=_SIZES[0], num_repeats=1, workloads=without or tuple(workloads))


def _fits(
    workloads: Sequence[Workload],
    size: Size,
    speeds: Mapping[str, SideSpeed],
    num_repeats: int,
    *,
    seconds: float,
    context: int | None,
) -> bool:
    demands = [demand_of(workload, size) for workload in workloads]
    chars_per_token = min(speed.chars_per_token for speed in speeds.values())
    longest = max(demand.most_chars for demand in demands) / chars_per_token + size.max_tokens
    if context is not None and longest > _USED_CONTEXT * context:
        return False
    needed_s = sum(seconds_of(demand, speed) for demand in demands for speed in speeds.values()) * num_repeats
    if any(workload.restarts for workload in workloads):
        # The one that keeps its state on disk begins anew for it.
        needed_s += max(speed.start_s for speed in speeds.values())
    return needed_s <= _USED * seconds


def _made_up(source: Random, size: Size) -> ClientReply:
    content = text(source, round(4 * size.max_tokens / WORD_CHARS))
    return ClientReply(
        id="",
        content=content,
        reasoning="",
        calls=(),
        num_prompt=None,
        num_cached=None,
        num_generated=None,
        sent_s=0.0,
        first_s=0.0,
        ended_s=0.0,
    )
