"""The prefix cache: what was computed once, for whoever comes next.

One radix tree per namespace, with segments and snapshots as payloads (`reprise.cache.tree`). Lookups change nothing;
a commit adds only what is not there yet; eviction takes nothing that a lease needs; `check()` recomputes the books.
Used by one thread.
"""

from collections.abc import Iterable, Sequence

from reprise.cache import commits, integrity, leasing, removal
from reprise.cache.commits import Committed
from reprise.cache.compaction import Compacted, compaction_steps, path_steps
from reprise.cache.contents import Contents
from reprise.cache.loans import LoanPlace, lent_nbytes, loans_on, owned_on, put, sole_lender
from reprise.cache.lookup import Match, Restore, landmark_at, match_in, read, resume_position, was_lost
from reprise.cache.marking import add_landmark
from reprise.cache.payload import Lent, SegmentPayload, Source
from reprise.cache.policy import Facts
from reprise.cache.tree import Landmark, Lease, new_root, walk
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens


class PrefixCache(Contents):
    """Everything reusable of one model, under one byte budget: the contents, and all that can be asked and done.

    `budget` counts the bytes of payloads; None is no bound. `reserved` (what live caches hold, set by the owner) is
    taken from it.
    """

    # Lookups. They change nothing.

    def match(self, tokens: Tokens, *, namespace: str = "") -> Match:
        """How far the tree agrees with `tokens`. O(length of the match)."""
        root = self.roots.get(namespace)
        return match_in(root if root is not None else new_root(), tokens, namespace)

    def resume_at(self, match: Match, *, limit: int) -> int:
        """The largest position ≤ `limit` at which every layer can resume; 0 if there is none."""
        return resume_position(self.layout, match, limit)

    def read(self, match: Match, position: int) -> Restore:
        """What is needed to resume at `position`, which `resume_at` gave for the same match."""
        return read(self.layout, match, position)

    def was_lost(self, match: Match, position: int) -> bool:
        """Whether something was evicted that would have let this prompt resume behind `position`."""
        return was_lost(match, position)

    # Leases and landmarks.

    def lease(self, match: Match, position: int, *, is_request: bool = True) -> Lease:
        """Protect the matched path up to `position` until `release`, and note that it is used.

        `is_request`: somebody asked for it. Work that the server gives itself says nothing about who comes back when.
        """
        assert position <= match.length, (position, match.length)
        held = leasing.protect(match.walk, position)
        leasing.note_use(self, match, position)
        if is_request:
            held.number = leasing.note_arrival(self, match)
        return held

    def note_answer(self, lease: Lease, num_tokens: float) -> None:
        """Let the policy know that the request of this lease has its answer, and how long that is.

        In tokens like the prompt's: a fraction where one of those stands for many.
        """
        self.order.policy.answered(lease.number, num_tokens)

    def release(self, lease: Lease) -> None:
        """Give the lease back, and drop what was kept for it alone. Releasing twice is a bug."""
        leasing.release(self, lease)

    def landmark(self, tokens: Tokens, *, namespace: str, kind: BoundaryKind) -> Landmark | None:
        """The landmark at ``len(tokens)``, made now if the position is resumable without one; None if it is not."""
        match = self.match(tokens, namespace=namespace)
        position = len(tokens)
        if position == 0 or match.length < position:
            return None
        known = landmark_at(match.walk, position)
        if known is not None or self.resume_at(match, limit=position) < position:
            return known
        node = next(node for node in match.walk.nodes if position <= node.stop)
        made = add_landmark(self, node, position, kind, is_side=False)
        self.order.use(made)
        return made

    # Commits.

    def commit(
        self,
        tokens: Tokens,
        source: Source,
        *,
        kind: BoundaryKind,
        namespace: str = "",
        is_side: bool = False,
        pinned_until: float = 0.0,
        is_wanted: bool = False,
        stable_at: int | None = None,
    ) -> Committed:
        """Make the position ``len(tokens)`` resumable: copy from `source` what the tree does not have yet.

        What cannot fit the budget, even after eviction, is not stored, or only its beginning where every position is
        resumable: the result says so. If `source` raises, nothing was added; what was evicted to make room stays
        evicted. `is_wanted`: a client asked to keep something of this path, so it may take the place of whatever may
        be evicted; what is pinned itself may, too. `stable_at`: from there on the next turn may have something else
        (None: not known).
        """
        return commits.commit(
            self,
            tokens,
            source,
            kind=kind,
            namespace=namespace,
            is_side=is_side,
            pinned_until=pinned_until,
            is_wanted=is_wanted,
            stable_at=stable_at,
        )

    # Removal.

    def make_room(self, nbytes: int, *, new: Facts | None = None) -> bool:
        """Evict until `nbytes` more fit the budget. False if that cannot be: then nothing more can be evicted.

        `new`: what the room is for, if it may not take the place of what is worth more.
        """
        return removal.make_room(self, nbytes, new=new)

    def evict_one(self, reason: str, *, new: Facts | None = None) -> bool:
        """Evict the item of least worth. False if nothing may be evicted (for `new`, if that is given)."""
        return removal.evict_one(self, reason, new=new)

    def clear(self, namespace: str | None = None) -> None:
        """Drop everything that no lease protects, pins included: of one namespace, or of all. O(size of the trees)."""
        removal.clear(self, namespace)

    def forget(self) -> None:
        """Drop everything at once, leases included: for when what is stored is not to be trusted any more."""
        removal.forget(self)

    # Loans.

    def lender_at(self, match: Match, position: int) -> object | None:
        """The one live sequence that lends all full-attention entries ``[0, position)``, or None."""
        return sole_lender(self.read(match, position))

    def loans(self, lender: object, tokens: Tokens, *, namespace: str, start: int = 0) -> tuple[LoanPlace, ...]:
        """What `lender`, whose sequence is `tokens`, lends of the entries ``[start, …)``."""
        root = self.roots.get(namespace)
        return () if root is None else loans_on(root, tokens, lender, start=start)

    def owned(self, tokens: Tokens, *, namespace: str) -> tuple[LoanPlace, ...]:
        """The full-attention pieces on the path of `tokens` that the tree owns, and that one lease at most needs."""
        root = self.roots.get(namespace)
        return () if root is None else owned_on(root, tokens)

    def replace(self, places: Sequence[LoanPlace], payloads: Sequence[SegmentPayload]) -> None:
        """Put other payloads of the same entries in these places: copies of what was lent, or loans of what was held.

        What is lent counts here, and what is not as its lender's own.
        """
        self.reserved += lent_nbytes(place.piece for place in places)
        self.ledger.charge_kv(put(places, payloads))
        self.reserved -= sum(payload.nbytes for payload in payloads if isinstance(payload, Lent))

    # Compaction.

    def compact(self, *, max_entries: int) -> int:
        """Join small edges and pieces, copying about `max_entries` entries at most. Gives how much was done.

        0: there is nothing left to join. Meant for idle times, a step at a time. O(nodes) and what is copied.
        """
        return self._compacted(compaction_steps(self.roots.values(), longest=self.grain.piece, max_entries=max_entries))

    def compact_path(self, tokens: Tokens, *, namespace: str = "") -> int:
        """The same for the end of one path, which grows: for busy times.

        So a conversation that grows while the server is never idle is restored from few pieces as well. Copies at most
        a piece of each layer kind at a time. O(edges of the path) if there is nothing to do.
        """
        root = self.roots.get(namespace)
        if root is None:
            return 0
        return self._compacted(path_steps(walk(root, tokens).nodes, longest=self.grain.piece))

    def _compacted(self, steps: Iterable[Compacted]) -> int:
        done = 0
        for step in steps:
            self.ledger.count_nodes(-step.num_nodes)
            self.ledger.charge_kv(step.nbytes)
            done += step.num_nodes + step.num_entries
        return done

    # Integrity.

    def check(self) -> None:
        """Recompute everything from the trees (bytes, leases, order, coverage); AssertionError on any difference."""
        integrity.check(self)
