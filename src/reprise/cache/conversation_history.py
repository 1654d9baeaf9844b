"""Recognises prompts that continue earlier ones, whether those are still stored or evicted.

An eviction policy needs to know how likely a chat is to return. Evicted chats return too, and a policy that learns only
from what it kept never finds out what it should have kept. So every prompt leaves a few marks here: hashes of its
prefixes, at positions in its new part. A later prompt whose prefix has such a hash continues it. Marks take about 100
bytes per prompt, the newest 16,384 prompts are remembered, and no tokens are stored.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Tokens

MEMORY = 1 << 14
"""How many prompts are remembered."""

_SLOTS = 1 << 17
_MARKED = (0.25, 0.5, 0.75, 1.0)
"""Where a prompt is marked, as fractions of its new part: a template may rewrite the end."""

_END = 16
"""One more mark is this many tokens before the end: the next turn may not repeat the generation prompt."""

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptVisit:
    """One prompt's place in the history of its conversation. Times are counted in prompts.

    `turn`: turns before it. `gap`: prompts since the previous turn, None for a first turn or a branch. `num_new`:
    tokens that no earlier prompt had. `continues`: the number of the prompt that it continues; `num_others`: how many
    prompts continued that one before, `last_other`: the number of the latest of them. `has_tail`: whether it repeats
    what the continued prompt stored past its stable boundary, None if that stored nothing there.
    """

    number: int
    turn: int
    gap: int | None
    num_new: int
    continues: int | None
    num_others: int = 0
    last_other: int | None = None
    has_tail: bool | None = None


class ConversationHistory:
    """The most recent prompts, by number (from 1), and their marks."""

    def __init__(self) -> None:
        self.now = 0
        """The number of the newest prompt."""
        self._turns = np.zeros(MEMORY, dtype=np.int32)
        self._num_continued = np.zeros(MEMORY, dtype=np.int32)
        self._continued_by = np.zeros(MEMORY, dtype=np.int64)
        self._tail_at = np.zeros(MEMORY, dtype=np.int64)
        self._tail_keys = np.zeros(MEMORY, dtype=np.uint64)
        self._keys = np.zeros(_SLOTS, dtype=np.uint64)
        self._numbers = np.zeros(_SLOTS, dtype=np.int64)
        self._factors = np.zeros(0, dtype=np.uint64)
        self._seeds = np.random.default_rng(0x9E3779B9)

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> PromptVisit:
        """Record a prompt of which ``[0, known)`` is stored. O(length), about 50 µs for 10,000 tokens."""
        hashes = self._hashes(tokens, namespace)
        found = self._deepest(hashes)
        depth, before = found if found is not None else (0, None)
        new_at = min(len(tokens), max(known, depth))
        self.now += 1
        number = self.now
        slot, before_slot = number % MEMORY, (before or 0) % MEMORY
        num_others = int(self._num_continued[before_slot]) if before is not None else 0
        last_other = int(self._continued_by[before_slot]) if num_others > 0 else None
        # Only the first continuation is the next turn; later ones are branches.
        is_next_turn = before is not None and num_others == 0
        has_tail = self._has_tail(hashes, before) if before is not None and is_next_turn else None
        turn = 0
        if before is not None:
            turn = int(self._turns[before_slot]) + (1 if is_next_turn else 0)
            self._num_continued[before_slot] += 1
            self._continued_by[before_slot] = number
        self._turns[slot], self._num_continued[slot], self._tail_at[slot] = turn, 0, 0
        if new_at < len(tokens) or is_next_turn:
            self._mark(hashes, new_at, number)
        return PromptVisit(
            number=number,
            turn=turn,
            gap=number - before if before is not None and is_next_turn else None,
            num_new=len(tokens) - new_at,
            continues=before,
            num_others=num_others,
            last_other=last_other,
            has_tail=has_tail,
        )

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        """Record that prompt `number` and its answer are stored as `tokens`; the next turn may differ past `stable_at`.

        A later prompt's tail is compared up to the middle: a generation prompt may begin like an answer.
        """
        middle = (stable_at + len(tokens) + 1) // 2
        if number is not None and self._is_remembered(number):
            self._tail_at[number % MEMORY] = middle
            self._tail_keys[number % MEMORY] = self._hashes(tokens[:middle], namespace)[-1]

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        """The number of the newest remembered prompt that these tokens continue, or None."""
        found = self._deepest(self._hashes(tokens, namespace))
        return found[1] if found is not None else None

    def last_continuation(self, number: int | None) -> int | None:
        """The number of the latest prompt that continued prompt `number`, or None."""
        return int(self._continued_by[number % MEMORY]) if number is not None and self.is_continued(number) else None

    def is_continued(self, number: int | None) -> bool:
        """Whether a later prompt continued prompt `number`."""
        return number is not None and self._is_remembered(number) and bool(self._num_continued[number % MEMORY] > 0)

    def _has_tail(self, hashes: Hashes, number: int) -> bool | None:
        at = int(self._tail_at[number % MEMORY])
        if at == 0:
            return None
        return at <= len(hashes) and bool(hashes[at - 1] == self._tail_keys[number % MEMORY])

    def _is_remembered(self, number: int) -> bool:
        return number > 0 and self.now - number < MEMORY

    def _hashes(self, tokens: Tokens, namespace: str) -> Hashes:
        """Hashes of all prefixes, shape ``(length,)``: the multilinear family over 64 bits, with a mixing step.

        After Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
        """
        while len(self._factors) < len(tokens):
            more = self._seeds.integers(1, 1 << 63, size=max(4096, len(self._factors)), dtype=np.uint64)
            self._factors = np.concatenate([self._factors, more])
        seed = np.uint64(sum((i + 1) * 0x100000001B3 * byte for i, byte in enumerate(namespace.encode())) % (1 << 63))
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._factors[: len(tokens)]
        sums = np.cumsum(terms, dtype=np.uint64) + seed
        return (sums ^ (sums >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)

    def _deepest(self, hashes: Hashes) -> tuple[int, int] | None:
        """(prefix length, prompt number) of the deepest mark on a path, or None."""
        slots = hashes >> np.uint64(64 - 17)
        for at in np.flatnonzero(self._keys[slots] == hashes)[::-1]:
            number = int(self._numbers[slots[at]])
            if self._is_remembered(number):
                return int(at) + 1, number
        return None

    def _mark(self, hashes: Hashes, new_at: int, number: int) -> None:
        num_new = len(hashes) - new_at
        lengths = {new_at + max(1, int(num_new * share)) for share in _MARKED}
        # An exact repeat has no new part: the mark at the end becomes its own.
        for length in lengths | {len(hashes) - _END} if num_new > 0 else {len(hashes)}:
            if length > new_at or num_new == 0:
                key = hashes[length - 1]
                slot = int(key >> np.uint64(64 - 17))
                self._keys[slot], self._numbers[slot] = key, number
