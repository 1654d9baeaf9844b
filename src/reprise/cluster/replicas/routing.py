"""The choice of a replica for a request, without Ray.

A replica is asked what the request would find (`Offer`). The one with the least expected time to the first token is
taken; those that do not answer in time are what is left, two of them at random.
"""

import hashlib
import json
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar, cast

from cachetools import LRUCache

from reprise.cluster.replicas.forwarded import ForwardedRequest, json_object

R = TypeVar("R", bound=Hashable)

MAX_ASKED = 8
"""Every replica that is asked renders and tokenizes the prompt."""

_ALIKE = 0.05
_ALIKE_S = 0.005
"""Estimates that differ by less, relative or absolute, say nothing: then load decides, and what would be reused."""
_EVEN = 1
"""Replicas that differ by no more requests are as busy as each other."""

_UNSEEN_S = 0.1
"""What was sent this long before a replica was asked may not have been in its queue yet."""
_FORGOTTEN_S = 10.0

_LATE_S = 0.1
_WORTH = 0.5
"""Of the time that the best offer until now would take."""
_MAX_CHATS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A replica's offer for a request.

    `ttft_s`: the expected time to the first token, with its queue; `prefill_s`: the part of it that is this request's
    own work, and delays later requests; `num_computed`: prompt tokens that it would compute; `num_requests`:
    those that run and wait there.
    """

    ttft_s: float
    prefill_s: float
    num_computed: int
    num_requests: int

    def __post_init__(self) -> None:
        assert 0 <= self.prefill_s <= self.ttft_s and self.num_computed >= 0 and self.num_requests >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What went to a replica since it was asked: seconds of work, and requests."""

    work_s: float = 0.0
    num: int = 0


REFUSED = Offer(ttft_s=math.inf, prefill_s=0.0, num_computed=0, num_requests=0)
"""Of a replica that would answer with an error: the body is wrong, or continues what only another replica has."""


def wait_s(offers: Sequence[Offer | None], first_s: float, timeout_s: float) -> float:
    """How long to wait for the other replicas, when these have answered within the first `first_s` seconds.

    As long again and a moment, since one that hangs must not hold up everybody; longer where what is offered until now
    is so bad that waiting may be worth it.
    """
    best_s = min((offer.ttft_s for offer in offers if offer is not None), default=math.inf)
    return min(timeout_s - first_s, first_s + _LATE_S + best_s * _WORTH)


def ranked(offers: Mapping[R, Offer | None], sent: Mapping[R, Sent], random: Random) -> list[list[R]]:
    """The replicas in the order in which they are to be tried; in a group of several the shorter queue decides.

    By the expected time to the first token. Where that is alike, what would be reused decides as long as the replicas
    are evenly busy. After these, two at random of the replicas without an offer (None): with no offer at all that is
    the power of two choices. Those that would refuse are last.
    """
    ready = {
        replica: _Candidate(
            ttft_s=offer.ttft_s + sent.get(replica, _NOTHING).work_s,
            num_requests=offer.num_requests + sent.get(replica, _NOTHING).num,
            num_computed=offer.num_computed,
        )
        for replica, offer in offers.items()
        if offer is not None and offer is not REFUSED
    }
    order: list[list[R]] = []
    alike: dict[R, _Candidate] = {}
    least_s = 0.0
    for replica, candidate in sorted(ready.items(), key=lambda item: item[1].ttft_s):
        if alike and candidate.ttft_s > max(least_s * (1 + _ALIKE), least_s + _ALIKE_S):
            order += _by_load_and_reuse(alike)
            alike = {}
        if not alike:
            least_s = candidate.ttft_s
        alike[replica] = candidate
    order += _by_load_and_reuse(alike)
    silent = [replica for replica, offer in offers.items() if offer is None]
    refusing = [replica for replica, offer in offers.items() if offer is REFUSED]
    rest = [random.sample(group, min(2, len(group))) for group in (silent, refusing) if group]
    return [*order, *rest]


_NOTHING = Sent()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    ttft_s: float
    num_requests: int
    num_computed: int


def _by_load_and_reuse(alike: Mapping[R, _Candidate]) -> list[list[R]]:
    least = min((candidate.num_requests for candidate in alike.values()), default=0)
    groups: dict[tuple[int, int], list[R]] = {}
    for replica, candidate in alike.items():
        is_even = candidate.num_requests <= least + _EVEN
        key = (0, candidate.num_computed) if is_even else (candidate.num_requests, 0)
        groups.setdefault(key, []).append(replica)
    return [groups[key] for key in sorted(groups)]


def to_ask(replicas: Sequence[R], remembered: R | None, random: Random) -> list[R]:
    """The replicas to ask: all, or of many the one that had the chat before and others at random."""
    if len(replicas) <= MAX_ASKED:
        return list(replicas)
    first = [] if remembered is None or remembered not in replicas else [remembered]
    others = [replica for replica in replicas if replica not in first]
    return [*first, *random.sample(others, MAX_ASKED - len(first))]


class SentWork(Generic[R]):
    """The work that was sent to each replica a moment ago. An offer does not contain what came after it.

    Without it, requests that arrive together would all go to the replica that was idle when they were asked about.
    """

    def __init__(self) -> None:
        self._sent: dict[R, deque[tuple[float, float]]] = {}

    def add(self, replica: R, prefill_s: float, *, now_s: float) -> None:
        """This much was sent there."""
        sent = self._sent.setdefault(replica, deque())
        sent.append((now_s, prefill_s))
        while sent[0][0] < now_s - _FORGOTTEN_S:
            sent.popleft()

    def since(self, asked_s: float, replica: R) -> Sent:
        """The requests sent to the replica that its offer of `asked_s` does not include."""
        work = [work_s for at_s, work_s in self._sent.get(replica, ()) if at_s >= asked_s - _UNSEEN_S]
        return Sent(work_s=sum(work), num=len(work))

    def keep_only(self, replicas: Set[R]) -> None:
        """Forget replicas that are no more."""
        self._sent = {replica: sent for replica, sent in self._sent.items() if replica in replicas}


class ChatMemory(Generic[R]):
    """Which replica had the beginning of a chat last, for where there are too many replicas to ask all."""

    def __init__(self) -> None:
        self._replica_of: LRUCache[bytes, R] = LRUCache(_MAX_CHATS)

    def replica_of(self, chat: Sequence[bytes]) -> R | None:
        """The replica that had most of it."""
        return next((found for key in reversed(chat) if (found := self._replica_of.get(key)) is not None), None)

    def note(self, chat: Sequence[bytes], replica: R) -> None:
        """It has gone there."""
        # The system prompt alone, which all chats may share, tells nothing.
        for key in chat[1:] or chat:
            self._replica_of[key] = replica


def chat_keys(request: ForwardedRequest) -> list[bytes]:
    """A hash of each beginning of the chat, message by message; empty where the body has no list of messages."""
    body = json_object(request.body)
    messages: object = body.get("messages", body.get("input"))
    if not isinstance(messages, list):
        return []
    hashed = hashlib.blake2b((request.header("authorization") or "").encode(), digest_size=16)
    keys: list[bytes] = []
    for message in cast(list[Any], messages):
        hashed.update(json.dumps(message, sort_keys=True).encode())
        keys.append(hashed.copy().digest())
    return keys
