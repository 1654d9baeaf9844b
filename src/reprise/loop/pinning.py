"""Pins in the loop: what jobs ask to keep, within their share of the memory, and what keeps it."""

from __future__ import annotations

import logging

from reprise.cache import pins
from reprise.cache.store import PrefixCache
from reprise.cache.tree import Landmark
from reprise.core.job import Purpose
from reprise.core.pin import Pin, Pins, pin_id
from reprise.core.tokens import Tokens
from reprise.loop.task import Task

log = logging.getLogger("reprise.loop")

PINNED_SHARE = 2
"""Pins keep this part of the budget at most, so that there is always room for what nobody pinned."""


class Pinning:
    """The pins of the cache, as the loop sets, counts and lifts them. Owned by the engine thread."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._kept = pins.Kept()
        self._owners: dict[Landmark, set[str]] = {}
        self._counted_at = -1

    def keep(self, task: Task) -> None:
        """Pin what the client marked, as far as it is stored: new, or there before and asked for again.

        The time of each begins when it is found there first (`now_s`), and does not begin anew as the job goes on.
        """
        cache, namespace = self._cache, task.job.namespace
        num_before = cache.pins.num_changes
        for position, seconds in task.pins.items():
            if position <= task.position:
                until = task.kept_until.get(position, cache.now_s + seconds)
                mark = pins.pin(cache, task.tokens_to(position), until=until, namespace=namespace)
                if mark is not None:
                    self._own(mark, task.job.owner)
                    task.kept_until[position] = until
        retained_at, seconds = task.retained_at, task.job.retain_for_s
        if retained_at is not None and seconds is not None and retained_at <= task.position:
            until = task.retained_until if task.retained_until is not None else cache.now_s + seconds
            mark = pins.retain(cache, task.tokens_to(retained_at), until=until, namespace=namespace)
            if mark is not None:
                self._own(mark, task.job.owner)
                task.retained_until = until
        if cache.pins.num_changes > num_before and cache.budget is not None:
            num = pins.keep_within(cache, cache.budget // PINNED_SHARE)
            if num > 0:
                log.warning("%d pins gave way: pins keep half of --cache-bytes at most", num)
        prompt = task.job.prompt
        if task.pin is None and task.job.purpose is Purpose.PREFILL and len(prompt) in task.kept_until:
            # Now, before it may be over.
            task.pin = self.of(prompt.tokens, namespace=namespace)

    def kept(self) -> pins.Kept:
        """What the pins keep now. O(pins × depth) if that has changed since it was asked last."""
        cache = self._cache
        if self._counted_at != cache.pins.num_changes or self._kept.until <= cache.now_s:
            self._counted_at, self._kept = cache.pins.num_changes, pins.kept(cache)
        return self._kept

    def of(self, tokens: Tokens, *, namespace: str) -> Pin | None:
        """The pin of this prefix, None if it is not pinned. O(tokens of the pins)."""
        mark = self._named(pin_id(tokens), namespace)
        return None if mark is None else self._pin(mark)

    def listed(self, namespace: str, *, owner: str) -> Pins:
        """The pins of an owner in a namespace. O(tokens of them)."""
        marks = [mark for mark in self._of(namespace) if owner in self._owners_of(mark)]
        return Pins(pins=tuple(self._pin(mark) for mark in marks), nbytes=pins.nbytes_of(marks))

    def unpin(self, name: str, *, namespace: str, owner: str) -> bool:
        """Let the pin of this name go, unless another owner has it too. False if this one has none."""
        found = self._named(name, namespace)
        if found is None or owner not in self._owners_of(found):
            return False
        self._owners[found].remove(owner)
        return len(self._owners[found]) > 0 or pins.unpin(self._cache, found)

    def _own(self, mark: Landmark, owner: str) -> None:
        if len(self._owners) > 2 * len(self._cache.pins) + 16:
            # What is pinned no more, or has been evicted, belongs to nobody.
            self._owners = {pinned: self._owners_of(pinned) for pinned in self._cache.pins}
        self._owners.setdefault(mark, set()).add(owner)

    def _owners_of(self, mark: Landmark) -> set[str]:
        return self._owners.get(mark, set())

    def _named(self, name: str, namespace: str) -> Landmark | None:
        return next((mark for mark in self._of(namespace) if pin_id(pins.tokens_of(mark)) == name), None)

    def _of(self, namespace: str) -> list[Landmark]:
        return [mark for mark in pins.pinned(self._cache) if pins.namespace_of(self._cache, mark) == namespace]

    def _pin(self, mark: Landmark) -> Pin:
        until, now_s = mark.stays_until, self._cache.now_s
        return Pin(
            id=pin_id(pins.tokens_of(mark)),
            tokens=mark.position,
            nbytes=pins.nbytes_of([mark]),
            expires_in_s=None if until == float("inf") else until - now_s,
            follows_chat=mark.pinned_until <= now_s,
        )
