"""The store as a state machine: any operation in any order, and after each the books, the leases and the laws."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from reprise.core.kinds import Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens
from reprise.memory import Account
from tests.cache.strategies import BUDGETS, NAMESPACES, layouts, runs
from tests.cache.trial import CacheTrial
from tests.matrix import examples

Chat = tuple[str, tuple[int, ...]]


class StoreMachine(RuleBasedStateMachine):
    chats = Bundle("chats")
    """Prompts that were seen, with their namespace."""
    running = Bundle("running")
    """Requests that hold a lease."""

    @initialize(target=chats, layout=layouts(), budget=BUDGETS, tokens=runs())
    def start(self, layout: Layout, budget: int | None, tokens: tuple[int, ...]) -> Chat:
        self.trial = CacheTrial(layout, budget)
        return ("", tokens)

    @rule(target=chats, chat=chats, cut=st.integers(0, 60), more=runs(), namespace=st.one_of(st.none(), NAMESPACES))
    def goes_on_or_branches(self, chat: Chat, cut: int, more: tuple[int, ...], namespace: str | None) -> Chat:
        return (chat[0] if namespace is None else namespace, chat[1][:cut][-40:] + more)

    @rule(target=running, chat=chats)
    def begins(self, chat: Chat):
        self.trial.request(chat[1], namespace=chat[0])
        return self.trial.held[-1]

    @rule(request=consumes(running))
    def ends(self, request) -> None:
        # By its lease: what is known of the others on its path changes while it runs.
        self.trial.release(next(i for i, held in enumerate(self.trial.held) if held.lease is request.lease))

    @rule(
        chat=chats,
        kind=st.sampled_from(list(BoundaryKind)),
        is_cancelled_at=st.one_of(st.none(), st.integers(1, 40)),
        pinned_for=st.sampled_from([0.0, 0.0, 0.0, 2.0]),
    )
    def is_stored(self, chat: Chat, kind: BoundaryKind, is_cancelled_at: int | None, pinned_for: float) -> None:
        pinned_until = self.trial.clock.now + pinned_for if pinned_for > 0 else 0.0
        self.trial.commit(chat[1][:is_cancelled_at], namespace=chat[0], kind=kind, pinned_until=pinned_until)

    @rule(target=chats, request=running, more=runs(max_size=12))
    def answer_is_stored(self, request, more: tuple[int, ...]) -> Chat:
        whole = request.tokens + more
        self.trial.commit(whole, namespace=request.namespace, kind=BoundaryKind.GENERATION_END)
        return (request.namespace, whole)

    @rule(target=chats, chat=chats, cut=st.integers(0, 60), more=runs())
    def next_turn_is_known(self, chat: Chat, cut: int, more: tuple[int, ...]) -> Chat:
        upcoming = chat[1][:cut] + more
        self.trial.expect(upcoming, namespace=chat[0], follows=chat[1])
        return (chat[0], upcoming)

    @rule(chat=chats, fails_after=st.integers(0, 4))
    def source_fails(self, chat: Chat, fails_after: int) -> None:
        self.trial.commit((*chat[1], 9), namespace=chat[0], fails_after=fails_after)

    @rule()
    def evicts(self) -> None:
        self.trial.evict()

    @rule(nbytes=st.integers(0, 400))
    def makes_room(self, nbytes: int) -> None:
        has_room = self.trial.cache.memory.reserve(nbytes)
        free = self.trial.cache.memory.available
        assert has_room == (free is None or free >= nbytes)

    @rule(budget=BUDGETS, reserved=st.integers(0, 300))
    def memory_changes(self, budget: int | None, reserved: int) -> None:
        self.trial.cache.memory.resize(budget)
        self.trial.cache.memory.measure(Account.SEQUENCES, reserved)

    @rule(seconds=st.floats(0.5, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.trial.clock.now += seconds

    @rule(max_entries=st.integers(1, 60))
    def compacts(self, max_entries: int) -> None:
        before = self.trial.cache.nbytes
        self.trial.cache.compact(max_entries=max_entries)
        assert self.trial.cache.nbytes == before

    @rule(chat=chats)
    def tidies_a_path(self, chat: Chat) -> None:
        before = self.trial.cache.nbytes
        self.trial.cache.compact_path(as_tokens(chat[1]), namespace=chat[0])
        assert self.trial.cache.nbytes == before

    @rule()
    def is_cleared(self) -> None:
        self.trial.clear()

    @rule(chat=chats, cut=st.integers(0, 60), limit=st.integers(0, 60), image=st.tuples(*[st.integers(0, 60)] * 2))
    def is_asked(self, chat: Chat, cut: int, limit: int, image: tuple[int, int]) -> None:
        tokens = chat[1][:cut] + chat[1]
        spans = [Span(*sorted(min(at, len(tokens)) for at in image))]
        self.trial.judge_read(tokens, namespace=chat[0], limit=min(limit, len(tokens)), spans=spans)

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "trial"):
            self.trial.judge()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.judge_contents()
            while self.trial.held:
                self.trial.release(0)
            self.trial.clear()
            self.trial.judge()
            assert self.trial.cache.nbytes == 0 and self.trial.cache.stats.num_tokens == 0


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
