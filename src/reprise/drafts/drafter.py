"""Makes drafts from the text of each namespace and of the running requests, and tracks how good they are."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from reprise.core.backend import DraftSource, DraftStatus, StoredText
from reprise.core.outcome import Drafted
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.drafts.benefit import (
    PASS_SIZES,
    TEXTS,
    AcceptanceRates,
    DraftAccount,
    DraftedLine,
    PassCosts,
    best_size,
)
from reprise.drafts.history import LONGEST_MATCH, NGRAMS, Continuation, TextEnd, TokenHistory
from reprise.drafts.trail import CONFIRMED, Trail

MOST_NBYTES = 64 << 20
"""Limit of the histories of all namespaces; the least recently used one is dropped first."""

_NAMESPACE_TOKENS = 1 << 19
_ANSWER_TOKENS = 1 << 17
_BLOCK = 256
"""Prompts are deduplicated in blocks of this many tokens: the next turn of a chat adds only its new part."""
_READ_AT_ONCE = 4096
"""The most prompt tokens added per step of the engine, so that streams are not delayed."""
_READ_ANSWER = 16
"""Answer tokens are added in batches of this many: one by one would cost more than the look-ups."""
_SELDOM = 16
"""Of so many steps only one looks for a draft where that brings nothing: the others cost nothing."""
_PATIENCE = ((256, _SELDOM), (32, 4))
"""Pairs: after this many fruitless steps in a row, only one step in that many looks up, until one succeeds: text that
repeats nothing is not slowed down, and text that begins to repeat is found a few tokens later."""
_RARELY = 64
"""The same where look-ups have cost too much lately: their account then refills about as fast as they spend."""
_LONGEST_REST = 256
"""The most answered tokens between two questions whether drafts are worth computing, while they are not."""
_DEAREST_SEARCH = 0.25
"""The most that a look-up counts, in passes over one token: one that took longer was held up by something else."""
EARLIER_TOKENS = 1 << 17
"""About how many tokens of texts from before the start are read of a namespace."""
_READ_EARLIER_AT_ONCE = 2 * _READ_AT_ONCE
"""The most of them added per step: a prompt's own text waits for them, so that newer text is found first."""
_OVERLAP = NGRAMS[0]
"""Context tokens that are added before a new piece of text, so that its first tokens can be found."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that will probably follow, at least one."""

    tokens: Tokens
    source: DraftSource
    match: int
    """Length of the match that it continues, in tokens."""
    seconds: float = 0.0
    """How long making it took."""
    is_resumed: bool = False
    """Whether the match is what agrees again behind a change."""

    def __post_init__(self) -> None:
        assert len(self.tokens) > 0, self


class ComputedDrafts(Protocol):
    """Computes drafts of one answer, where no text continues like it: for example with a draft model."""

    source: DraftSource

    @property
    def match(self) -> int:
        """What acceptance is learnt by, beside the source, in the place of a match's length."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds that a drafted token takes."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it may draft in this step."""
        ...

    def draft(self, num: int) -> Draft | None:
        """Up to `num` tokens that may follow."""
        ...


@dataclass(slots=True)
class ComputingRest:
    """How long it is not asked whether drafts are worth computing: that follows from the device more than the text."""

    until: int = 0
    """Tokens of answers."""
    length: int = _SELDOM
    """Of the next rest, in such tokens: twice that of the last one while they are not, up to `_LONGEST_REST`."""


@dataclass(slots=True)
class GroupPasses:
    """The passes that verify drafts of several sequences at once: their sizes, in tokens of each, and costs."""

    sizes: tuple[int, ...]
    costs: PassCosts


EarlierTexts = Callable[[str], Sequence[StoredText] | None]
"""The texts of a namespace from before the start, newest first; None: they are not known yet."""


class _Namespace:
    """The text of one namespace."""

    def __init__(self) -> None:
        self.history = TokenHistory(_NAMESPACE_TOKENS)
        self._earlier: list[StoredText] | None = None
        """Texts from before the start that are not read yet, newest first; None: they were not looked up."""
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Hash of a prompt block → where it ends in the history, oldest first."""

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + sum(text.tokens.nbytes for text in self._earlier or ())

    def look_up_earlier(self, look_up: Callable[[], Sequence[StoredText] | None]) -> None:
        """Look up the texts from before the start, unless that was done."""
        if self._earlier is None:
            texts = look_up()
            self._earlier = list(texts) if texts is not None else None

    def read_earlier(self) -> bool:
        """Add some of the texts from before the start, oldest first. Returns whether any were left."""
        num_left = _READ_EARLIER_AT_ONCE
        while self._earlier and num_left > 0:
            text = self._earlier.pop()
            whole = len(text.tokens)
            at = self.read(text.tokens, text.start, whole, is_whole=True)
            if at < whole:
                self._earlier.append(replace(text, start=at))
            num_left -= at - text.start
        return num_left < _READ_EARLIER_AT_ONCE

    def read(self, prompt: Tokens, start: int, stop: int, *, is_whole: bool) -> int:
        """Add the new blocks of ``[start, stop)``; `start` is a block's start. Returns the position reached."""
        new_from: int | None = None
        at, num_new = start, 0
        while at + _BLOCK <= stop and num_new < _READ_AT_ONCE:
            key = hash(prompt[at : at + _BLOCK].tobytes())
            if self._blocks.get(key, -1) >= self.history.start + _BLOCK:
                self._add(prompt, new_from, at)
                new_from = None
            else:
                new_from = at if new_from is None else new_from
                num_new += _BLOCK
                # Where it will end: nothing else is added in between.
                overlap = min(_OVERLAP, new_from)
                self._blocks[key] = self.history.end + 1 + overlap + at + _BLOCK - new_from
                self._blocks.move_to_end(key)
            at += _BLOCK
        if is_whole and stop - at < _BLOCK:
            new_from = at if new_from is None else new_from
            at = stop
        self._add(prompt, new_from, at)
        while self._blocks and next(iter(self._blocks.values())) < self.history.start + _BLOCK:
            self._blocks.popitem(last=False)
        return at

    def _add(self, prompt: Tokens, start: int | None, stop: int) -> None:
        if start is not None and stop > start:
            self.history.append(prompt[max(0, start - _OVERLAP) : stop])


class Drafts:
    """Makes drafts for the requests of one model. Used on one thread."""

    def __init__(
        self,
        *,
        rewinds: bool,
        sizes: Sequence[int] = PASS_SIZES,
        earlier: EarlierTexts = lambda namespace: (),
    ) -> None:
        """`rewinds`: whether every layer can drop rejected tokens. `sizes`: of the passes that may verify drafts."""
        self._earlier = earlier
        self.rewinds = rewinds
        self.sizes = tuple(sizes)
        self._first_sizes = self.sizes
        self.costs = PassCosts()
        self.groups: dict[int, GroupPasses] = {}
        """By the number of sequences, more than one."""
        self.rates = AcceptanceRates()
        self.num_drafted: Counter[DraftSource] = Counter()
        self.num_accepted: Counter[DraftSource] = Counter()
        self.saved_s = 0.0
        """Seconds of decoding that drafts have saved, compared with passes over one token."""
        looked_up = DraftAccount()
        self.accounts = {source: looked_up if source in TEXTS else DraftAccount() for source in DraftSource}
        """Look-ups share one, whatever text they found."""
        self.searches = DraftAccount()
        """What look-ups took themselves, and the tokens that they brought."""
        self.num_answered = 0
        """Tokens of answers so far."""
        self._num_noted = 0
        """Those that the accounts know of."""
        self.rests: defaultdict[tuple[DraftSource, int], ComputingRest] = defaultdict(ComputingRest)
        """Of what computes drafts, by what acceptance is learnt by."""
        self._each_account = (*{id(account): account for account in self.accounts.values()}.values(), self.searches)
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()
        self._status: DraftStatus | None = None
        """Asked for in each step: it is made again where something has changed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the histories of all namespaces, without those of running requests. O(namespaces)."""
        return sum(namespace.nbytes for namespace in self._namespaces.values())

    def start(
        self,
        prompt: Tokens,
        *,
        namespace: str,
        prediction: Tokens | None = None,
        computed: ComputedDrafts | None = None,
    ) -> RequestDrafts:
        """The drafts of a request. `prediction`: the output that its client predicts."""
        self.namespace(namespace).look_up_earlier(lambda: self._earlier(namespace))
        self.note_growth()
        return RequestDrafts(self, prompt, namespace, prediction, computed)

    def group(self, num: int) -> GroupPasses:
        """The passes over `num` sequences."""
        if num == 1:
            return GroupPasses(self.sizes, self.costs)
        if num not in self.groups:
            self.groups[num] = GroupPasses(self._first_sizes, PassCosts())
        return self.groups[num]

    def best_size(self, lines: Sequence[DraftedLine], most: int, *, step: float = 0.0) -> int:
        """See `reprise.drafts.benefit.best_size`."""
        passes = self.group(len(lines))
        return best_size(lines, passes.costs, rewinds=self.rewinds, sizes=passes.sizes, most=most, step=step)

    def clear(self, namespace: str | None = None) -> None:
        """Drop the history of a namespace, or of all."""
        if namespace is None:
            self._namespaces.clear()
        else:
            self._namespaces.pop(namespace, None)
        self._status = None

    def namespace(self, name: str) -> _Namespace:
        """The text of a namespace, created if needed."""
        if name not in self._namespaces:
            self._namespaces[name] = _Namespace()
            self._status = None
        self._namespaces.move_to_end(name)
        return self._namespaces[name]

    def note_growth(self) -> None:
        """Text was added to the namespace used last: drop the least recently used ones beyond `MOST_NBYTES`."""
        while len(self._namespaces) > 1 and self.nbytes > MOST_NBYTES:
            self._namespaces.popitem(last=False)
        self._status = None

    def note_answered(self, num_tokens: int) -> None:
        """`num_tokens` of answers were decoded."""
        self.num_answered += num_tokens
        if self.num_answered - self._num_noted >= _SELDOM:
            for account in self._each_account:
                account.note_answered(self.num_answered - self._num_noted)
            self._num_noted = self.num_answered

    def note_search(self, seconds: float, costs: PassCosts) -> None:
        """Looking for drafts took so long before a pass of these: on a fast device that is a part of a pass."""
        if costs.is_known:
            self.searches.add(-min(_DEAREST_SEARCH, seconds / costs.one_s))

    def note_verified(self, source: DraftSource, *, num: int, num_accepted: int, saved_s: float) -> None:
        """Count the tokens of a draft that were verified, and those of them that were accepted."""
        self.num_drafted[source] += num
        self.num_accepted[source] += num_accepted
        self.saved_s += saved_s
        if source in TEXTS:
            self.searches.add(num_accepted)
        self._status = None

    def status(self) -> DraftStatus:
        if self._status is None:
            self._status = DraftStatus(
                num_drafted={str(source): self.num_drafted[source] for source in DraftSource},
                num_accepted={str(source): self.num_accepted[source] for source in DraftSource},
                saved_s=self.saved_s,
                nbytes=self.nbytes,
            )
        return self._status

    def check(self) -> None:
        """AssertionError unless all look-up tables agree with their tokens. O(tokens)."""
        for namespace in self._namespaces.values():
            namespace.history.check()


class _Shadow:
    """A draft that is not verified, and how much of it turns out to be right."""

    def __init__(self, draft: Draft, num_fed: int) -> None:
        self.draft = draft
        self.num_right = 0
        self.size = num_fed + len(draft.tokens)
        """Of the pass that would verify it, in tokens."""

    def follow(self, tokens: Sequence[int]) -> bool:
        """The answer continued with these tokens. Returns whether all is known."""
        for token in tokens:
            if self.num_right == len(self.draft.tokens) or self.draft.tokens[self.num_right] != token:
                return True
            self.num_right += 1
        return self.num_right == len(self.draft.tokens)


class RequestDrafts:
    """The drafts of one running request."""

    def __init__(
        self,
        drafts: Drafts,
        prompt: Tokens,
        namespace: str,
        prediction: Tokens | None,
        computed: ComputedDrafts | None,
    ) -> None:
        self.num_drafted: Counter[DraftSource] = Counter()
        self.num_accepted: Counter[DraftSource] = Counter()
        self.saved_s = 0.0
        """See `Drafts.saved_s`."""
        self.holds_back = False
        """A draft would have been computed, had the next token not been chosen ahead: it is not to be again."""
        self._computed = computed
        self._untried: Draft | None = None
        """What was found and is not verified: whether its first token is right is seen all the same."""
        self._shadow: _Shadow | None = None
        """What would have been verified if its source did not rest."""
        self.broken: DraftAccount | None = None
        """Whose draft the last pass verified: the next one was not run ahead for it."""
        self.shared = drafts
        self._prompt = prompt
        self._namespace = namespace
        self.num_read = 0
        """Prompt tokens added to the history so far."""
        self._answer: list[int] = []
        self._own = TokenHistory(_ANSWER_TOKENS)
        if prediction is not None and len(prediction) > 0:
            # As if it followed the prompt.
            self._own.append(join_tokens(prompt[-_OVERLAP:], prediction))
        self._predicted_to = self._own.end
        self._own.append(prompt[-_OVERLAP:])
        self._num_own = 0
        """Answer tokens added to `_own` so far."""
        self._num_in_vain = 0
        """Fruitless look-ups in a row."""
        self._num_idle = 0
        """Steps in which nothing is looked for."""
        self.has_looked = False
        """Whether something was looked up since the last pass that was noted."""
        self._trail: Trail | None = None
        """The text that the answer was last found in."""
        self._num_followed = 0
        """Answer tokens that it has followed."""
        self._prompt_end: list[int] = prompt[-LONGEST_MATCH:].tolist()

    @property
    def drafted(self) -> dict[str, Drafted]:
        """What was drafted and verified so far, by source."""
        return {str(s): Drafted(num=num, num_accepted=self.num_accepted[s]) for s, num in self.num_drafted.items()}

    def read_prompt(self, stop: int) -> None:
        """Add some of the new part of the prompt, which is computed up to `stop`, to the history.

        Before it, the texts from before the start.
        """
        if self.num_read < stop:
            whole = len(self._prompt)
            namespace = self.shared.namespace(self._namespace)
            if not namespace.read_earlier():
                self.num_read = namespace.read(self._prompt, self.num_read, stop, is_whole=stop == whole)
            self.shared.note_growth()

    def accept(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the answer. What is looked up later is not touched now: this is done every step."""
        untried, self._untried = self._untried, None
        if untried is not None:
            is_right = untried.tokens[0] == tokens[0]
            self._learn(untried, accepted=int(is_right), drafted=1)
        self.shared.note_answered(len(tokens))
        if self._shadow is not None and self._shadow.follow(tokens):
            account = self.shared.accounts[self._shadow.draft.source]
            account.note_unverified(1 + self._shadow.num_right, expected=self.shared.costs.relative(self._shadow.size))
            self._shadow = None
        self._answer += tokens

    def end(self) -> None:
        """The answer has ended: add it to the history."""
        if self._answer:
            answer = join_tokens(self._prompt[-_OVERLAP:], as_tokens(self._answer))
            self.shared.namespace(self._namespace).history.append(answer)
            self.shared.note_growth()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is looked for in the next step."""
        return self._num_idle > 0

    def skip(self) -> None:
        """A step in which nothing is looked for, and of which nothing is noted."""
        self._num_idle -= 1
        self._num_in_vain += 1
        self.holds_back = False

    def find(self, most: int, forced: Sequence[int]) -> Draft | None:
        """What may continue the answer, at most `most` tokens, whether or not it is worth a pass. See `propose`."""
        self._untried = self._find(most, forced)
        return self._untried

    def note_in_vain(self) -> None:
        """Nothing that was found is verified in this step."""
        self._num_in_vain += 1

    def rests(self, draft: Draft, size: int) -> bool:
        """Whether its source has lost too much lately: then it is only seen whether the draft is right.

        `size`: of the pass that would verify it, in tokens.
        """
        if not self.shared.accounts[draft.source].is_overdrawn:
            return False
        if self._shadow is None:
            self._shadow = _Shadow(draft, size)
        return True

    def compute(self, row: DecodingRow, *, is_chosen: bool) -> Draft | None:
        """A computed draft of this request, which decodes alone, if it is worth a pass; else it may be idle a while."""
        if self._computed is not None and row.most > 0:
            num = self._num_computed(self._computed, row)
            if num > 0:
                self.holds_back = is_chosen
                return None if is_chosen else self._computed.draft(num)
        if self.num_read >= len(self._prompt):
            self._num_idle = -self._num_in_vain % self._patience
        return None

    def _num_computed(self, computed: ComputedDrafts, row: DecodingRow) -> int:
        """How many tokens of a computed draft are worth a pass; 0 also while this is not asked."""
        drafts = self.shared
        rest = drafts.rests[computed.source, computed.match]
        if drafts.num_answered < rest.until or drafts.accounts[computed.source].is_overdrawn or not computed.is_ready:
            return 0
        line = DraftedLine(row.num_fed, row.most, drafts.rates.of(computed.source, computed.match))
        step = computed.step_s / drafts.costs.one_s
        num = drafts.best_size([line], row.num_fed + row.most, step=step) - row.num_fed
        if num > 0:
            rest.length = _SELDOM
            return num
        if row.num_fed + row.most >= drafts.sizes[-1]:
            # Near an answer's end a longer one might be. Nothing is learnt of a draft that is not computed, so one is
            # tried again in time.
            drafts.rates.fade(computed.source, computed.match, num=rest.length)
            rest.until, rest.length = drafts.num_answered + rest.length, min(2 * rest.length, _LONGEST_REST)
        return 0

    def note(self, draft: Draft | None, *, num_tokens: int, cost: float, expected: float, one_s: float) -> None:
        """Record a pass that yielded `num_tokens` of this request: the accepted draft tokens and one more.

        `cost` and `expected`: of the pass, and as it was estimated, as multiples of one over a single token, which
        takes `one_s`.
        """
        broken, self.broken = self.broken, None
        if draft is None:
            if broken is not None:
                broken.add(min(0.0, expected - cost))
            return
        drafts, accepted = self.shared, num_tokens - 1
        self._untried = None
        self.broken = drafts.accounts[draft.source]
        self.broken.note_verified(num_tokens, cost=cost, expected=expected, step=draft.seconds / one_s)
        if self._computed is None or draft.source is not self._computed.source:
            self._num_in_vain = 0 if accepted > 0 else self._num_in_vain + 1
        saved_s = (num_tokens - cost) * one_s - draft.seconds
        self.saved_s += saved_s
        self._learn(draft, accepted=accepted, drafted=len(draft.tokens))
        self.num_drafted[draft.source] += len(draft.tokens)
        self.num_accepted[draft.source] += accepted
        drafts.note_verified(draft.source, num=len(draft.tokens), num_accepted=accepted, saved_s=saved_s)

    def _learn(self, draft: Draft, *, accepted: int, drafted: int) -> None:
        rates = self.shared.rates
        rates.note(draft.source, draft.match, accepted=accepted, drafted=drafted, is_resumed=draft.is_resumed)

    def _find(self, most: int, forced: Sequence[int]) -> Draft | None:
        found = self._look_up(most) if self._num_in_vain % self._patience == 0 else None
        if len(forced) == 0:
            return found
        forced = list(forced[:most])
        if found is None or found.tokens[: len(forced)].tolist() != forced:
            return Draft(as_tokens(forced), DraftSource.GRAMMAR, 0)
        return found

    @property
    def _patience(self) -> int:
        """Of so many steps only one looks up."""
        if self.shared.searches.is_overdrawn:
            return _RARELY
        return next((each for num, each in _PATIENCE if self._num_in_vain >= num), 1)

    def _look_up(self, most: int) -> Draft | None:
        self.has_looked = True
        self._read_answer()
        end = self._answer[-LONGEST_MATCH:]
        tail = TextEnd(end if len(end) == LONGEST_MATCH else [*self._prompt_end, *end])
        num = min(most, max(self.shared.sizes))
        history = self.shared.namespace(self._namespace).history
        own, earlier = self._own.find(tail, num=num), history.find(tail, num=num)
        # What was cleared is not followed any longer.
        if self._trail is not None and self._trail.history not in (self._own, history):
            self._trail = None
        followed = self._followed(self._trail, num)
        if own is not None and (earlier is None or own.match >= earlier.match):
            found, place = Draft(own.tokens, self._source(own), own.match), (self._own, own.at)
        elif earlier is not None:
            found, place = Draft(earlier.tokens, DraftSource.HISTORY, earlier.match), (history, earlier.at)
        else:
            return followed
        if followed is not None and self._is_better(followed, found):
            return followed
        if self._trail is None or found.match >= CONFIRMED:
            # Fewer equal tokens may be chance, and would lose the place behind a change.
            self._trail = Trail(*place, match=found.match, source=found.source)
        return found

    def _followed(self, trail: Trail | None, num: int) -> Draft | None:
        tokens = trail.continuation(num) if trail is not None else None
        if trail is None or tokens is None:
            return None
        return Draft(tokens, trail.source, min(trail.match, LONGEST_MATCH), is_resumed=trail.is_resumed)

    def _is_better(self, followed: Draft, found: Draft) -> bool:
        """Whether the text that the answer was in is more likely to continue than what an n-gram finds."""
        if not followed.is_resumed:
            return followed.match >= found.match
        rates = self.shared.rates
        return rates.of(followed.source, followed.match, is_resumed=True) > rates.of(found.source, found.match)

    def _source(self, found: Continuation) -> DraftSource:
        return DraftSource.PREDICTION if found.at < self._predicted_to else DraftSource.ANSWER

    def _read_answer(self) -> None:
        if self._trail is not None:
            self._trail.follow(self._answer[self._num_followed :])
            if self._trail.is_lost:
                self._trail = None
        self._num_followed = len(self._answer)
        if len(self._answer) - self._num_own >= _READ_ANSWER:
            self._own.append(as_tokens(self._answer[self._num_own :]), follows=True)
            self._num_own = len(self._answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRow:
    """A request that decodes, alone or in one pass with others."""

    drafts: RequestDrafts
    num_fed: int
    """Tokens that the pass takes anyway."""
    most: int
    """The most tokens of a draft."""
    forced: Callable[[], Sequence[int]] = tuple
    """The next tokens if a grammar allows only these; asked for where a draft may be verified."""


def propose(rows: Sequence[DecodingRow], *, most: int | None = None, is_chosen: bool = False) -> list[Draft | None]:
    """A draft of each of these requests, which decode in one pass, so that this pays; None where one has none.

    Looked up in text or forced by a grammar; of a single request it may be computed. `most`: tokens of each row in the
    longest pass that fits. `is_chosen`: a pass was run ahead, so this step verifies nothing, and nothing is computed
    for it.
    """
    drafts = rows[0].drafts.shared
    passes = drafts.group(len(rows))
    # Until it is known which passes may verify, none is held back for them.
    may_draft = len(passes.sizes) > 1
    holds_back = may_draft and passes.costs.wants_single
    made: list[Draft | None] = [None] * len(rows)
    for row in rows:
        row.drafts.holds_back = holds_back
    if not may_draft or holds_back:
        return made
    found = [row.drafts.find(row.most, row.forced()) if row.most > 0 else None for row in rows]
    lines = [_line(drafts.rates, row.num_fed, draft) for row, draft in zip(rows, found, strict=True)]
    longest = max(row.num_fed + row.most for row in rows) if most is None else most
    size = drafts.best_size(lines, longest) if any(found) else 0
    for at, (row, line, draft) in enumerate(zip(rows, lines, found, strict=True)):
        num = line.num_drafted(size) if size > 0 else 0
        if draft is not None and num > 0:
            cut = replace(draft, tokens=draft.tokens[:num])
            made[at] = None if row.drafts.rests(cut, row.num_fed + num) else cut
        if made[at] is None:
            row.drafts.note_in_vain()
    if len(rows) == 1 and made[0] is None:
        made[0] = rows[0].drafts.compute(rows[0], is_chosen=is_chosen)
    return made


def _line(rates: AcceptanceRates, num_fed: int, draft: Draft | None) -> DraftedLine:
    if draft is None:
        return DraftedLine(num_fed, 0, 0.0)
    rate = rates.of(draft.source, draft.match, is_resumed=draft.is_resumed)
    return DraftedLine(num_fed, len(draft.tokens), rate)


def note(
    rows: Sequence[DecodingRow],
    made: Sequence[Draft | None],
    num_tokens: Sequence[int],
    *,
    seconds: float,
    search_s: float = 0.0,
) -> None:
    """Record a pass over these requests that took `seconds` and yielded `num_tokens` of each.

    What it cost more than one over a token of each is shared by those that had a draft; what the next one costs more,
    which was not run ahead for it, too. `search_s`: what looking for drafts took before it.
    """
    drafts = rows[0].drafts.shared
    costs = drafts.group(len(rows)).costs
    looked = [row.drafts for row in rows if row.drafts.has_looked]
    for each in looked:
        each.has_looked = False
    if looked:
        drafts.note_search(search_s, costs)
    size = max(row.num_fed + (0 if draft is None else len(draft.tokens)) for row, draft in zip(rows, made, strict=True))
    num_paying = sum(draft is not None for draft in made)
    if len(rows) > 1 and num_paying == 0 and size > 1:
        return  # Two passes: one for what was still to be fed.
    costs.note(size, seconds)
    if not costs.is_known:
        return
    num_paying = num_paying or sum(row.drafts.broken is not None for row in rows)
    share = len(rows) / max(1, num_paying)
    cost, expected = (1 + (each - 1) * share for each in (costs.relative_of(size, seconds), costs.relative(size)))
    for row, draft, num in zip(rows, made, num_tokens, strict=True):
        row.drafts.note(draft, num_tokens=num, cost=cost, expected=expected, one_s=costs.one_s)
