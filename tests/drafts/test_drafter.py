"""Drafts of a request: from its own answer, from what was said in its namespace, from what its client predicts."""

from collections.abc import Sequence

import numpy as np
import pytest

from reprise.core.backend import DraftSource, StoredText
from reprise.core.tokens import as_tokens
from reprise.drafts.drafter import (
    EARLIER_TOKENS,
    MOST_NBYTES,
    DecodingRow,
    Draft,
    Drafts,
    EarlierTexts,
    RequestDrafts,
    note,
    propose,
)
from reprise.drafts.history import Continuation, TextEnd, TokenHistory

RNG = np.random.default_rng(7)


def words(num: int) -> list[int]:
    return [int(token) for token in RNG.integers(0, 50_000, num)]


def free_drafts(*, earlier: EarlierTexts = lambda namespace: ()) -> Drafts:
    """Of a device on which every pass costs the same."""
    drafts = Drafts(rewinds=True, earlier=earlier)
    for size in (1, 2, 4, 8, 16, 32):
        for _ in range(4):
            drafts.costs.note(size, 0.01)
    return drafts


class CountedHistory(TokenHistory):
    num_lookups = 0

    def find(self, tail: TextEnd, *, num: int) -> Continuation | None:
        self.num_lookups += 1
        return super().find(tail, num=num)


def count_lookups(drafts: Drafts) -> CountedHistory:
    """Give the namespace of all requests, which is empty, a history that counts."""
    history = drafts.namespace("").history = CountedHistory(1 << 20)
    return history


def begin(
    drafts: Drafts, prompt: list[int], *, namespace: str = "", prediction: list[int] | None = None
) -> RequestDrafts:
    request = drafts.start(
        as_tokens(prompt), namespace=namespace, prediction=None if prediction is None else as_tokens(prediction)
    )
    request.read_prompt(len(prompt))
    return request


def alone(request: RequestDrafts, *, most: int = 31, forced: Sequence[int] = ()) -> list[DecodingRow]:
    return [DecodingRow(drafts=request, num_fed=1, most=most, forced=lambda: forced)]


def proposed(request: RequestDrafts, *, most: int = 31) -> tuple[list[int], DraftSource | None]:
    (draft,) = propose(alone(request, most=most))
    return ([], None) if draft is None else (draft.tokens.tolist(), draft.source)


def test_a_file_in_the_prompt_is_drafted_line_by_line() -> None:
    file = words(900)
    request = begin(free_drafts(), [*words(30), *file, *words(20)])
    assert proposed(request) == ([], None)
    request.accept(file[100:108])
    assert proposed(request) == (file[108:139], DraftSource.HISTORY)
    assert proposed(request, most=3) == (file[108:111], DraftSource.HISTORY)


def test_an_earlier_answer_is_drafted_for_the_same_prompt_from_its_first_token_on() -> None:
    drafts, prompt, answer = free_drafts(), words(300), words(60)
    first = begin(drafts, prompt)
    first.accept(answer)
    first.end()
    assert proposed(begin(drafts, prompt)) == (answer[:31], DraftSource.HISTORY)


def test_what_the_answer_said_further_up_comes_before_what_others_said() -> None:
    drafts = free_drafts()
    other = begin(drafts, [*words(40), 1, 2, 3, 4, 77, 77, *words(10)])
    other.end()
    request = begin(drafts, words(40))
    request.accept([1, 2, 3, 4, 88, 89, *words(15), 1, 2, 3, 4])
    tokens, source = proposed(request)
    assert (tokens[:2], source) == ([88, 89], DraftSource.ANSWER)


def test_a_prediction_is_drafted_from_its_beginning_and_behind_an_edit() -> None:
    predicted = words(200)
    request = begin(free_drafts(), words(50), prediction=predicted)
    assert proposed(request) == (predicted[:31], DraftSource.PREDICTION)
    request.accept([*predicted[:20], *words(6), *predicted[30:38]])
    assert proposed(request) == (predicted[38:69], DraftSource.PREDICTION)


def test_behind_a_changed_value_one_equal_token_is_enough() -> None:
    file = words(200)
    request = begin(free_drafts(), [*file, *words(20)])
    request.accept(file[100:120])
    assert proposed(request)[0][:4] == file[120:124]
    # A value of four tokens in the place of one of three.
    for token in words(4):
        request.accept([token])
        assert proposed(request) == ([], None)
    request.accept(file[123:124])
    assert proposed(request) == (file[124:155], DraftSource.HISTORY)


def test_behind_a_change_the_text_before_it_is_followed_and_not_a_newer_one_that_is_like_it_by_chance() -> None:
    drafts, file, value = free_drafts(), words(200), words(2)
    elsewhere = begin(drafts, [*words(20), *value, *words(20)])
    elsewhere.end()
    request = begin(drafts, [*file, *words(20)])
    request.accept(file[100:120])
    assert proposed(request)[0][:4] == file[120:124]
    request.accept(value)
    assert proposed(request)[0][:4] != file[121:125]
    request.accept(file[122:123])
    assert proposed(request)[0][:4] == file[123:127]


def test_what_is_cleared_is_not_followed_any_longer() -> None:
    drafts, file = free_drafts(), words(200)
    request = begin(drafts, [*file, *words(20)])
    request.accept(file[100:110])
    assert proposed(request)[0][:4] == file[110:114]
    drafts.clear()
    request.accept(file[110:112])
    assert proposed(request) == ([], None)


def test_namespaces_draft_from_their_own_texts_alone() -> None:
    drafts, prompt, answer = free_drafts(), words(600), words(50)
    mine = begin(drafts, prompt, namespace="mine")
    mine.accept(answer)
    mine.end()
    assert proposed(begin(drafts, prompt, namespace="theirs")) == ([], None)
    assert proposed(begin(drafts, prompt, namespace="mine"))[0] == answer[:31]
    drafts.clear("mine")
    assert proposed(begin(drafts, prompt, namespace="mine")) == ([], None)


def test_a_chat_adds_what_is_new_in_each_turn() -> None:
    drafts, chat = free_drafts(), words(2000)
    begin(drafts, chat)
    before = drafts.namespace("").history.end
    for _ in range(3):
        chat = [*chat, *words(300)]
        begin(drafts, chat)
    # Blocks that were not whole are taken in again; what is before them is not.
    assert drafts.namespace("").history.end - before <= 3 * (300 + 2 * 256)
    drafts.check()


def test_a_long_prompt_is_taken_in_step_by_step_and_found_all_the_same() -> None:
    drafts, prompt = free_drafts(), words(30_000)
    request = drafts.start(as_tokens(prompt), namespace="")
    steps = 0
    while request.num_read < len(prompt):
        before = drafts.namespace("").history.end
        request.read_prompt(len(prompt))
        assert drafts.namespace("").history.end - before <= 4096 + 256 + 10
        steps += 1
    assert steps > 6
    found = 0
    for at in range(300, 29_900, 100):
        request.accept(prompt[at - 8 : at])
        found += proposed(request, most=20)[0][:4] == prompt[at : at + 4]
    # A few are hidden by others with the same hash.
    assert found >= 285


def stored(text: list[int], *, start: int = 0) -> StoredText:
    return StoredText(tokens=as_tokens(text), start=start)


def read_all(request: RequestDrafts, prompt: list[int]) -> int:
    """Have everything read that was said before, and the prompt. Returns in how many steps."""
    steps = 0
    while request.num_read < len(prompt):
        request.read_prompt(len(prompt))
        steps += 1
    return steps


def test_what_was_said_before_the_start_is_drafted_and_what_is_newer_comes_first() -> None:
    same, older, newer, own = words(12), words(40), words(40), words(40)
    drafts = free_drafts(earlier=lambda name: [stored([*same, *newer]), stored([*same, *older])] if name == "" else ())
    prompt = words(300)
    request = drafts.start(as_tokens(prompt), namespace="")
    read_all(request, prompt)
    request.accept(older[:8])
    assert proposed(request)[0] == older[8:39]
    request.accept(same)
    assert proposed(request) == (newer[:31], DraftSource.HISTORY)
    prompt = [*same, *own, *words(20)]
    request = drafts.start(as_tokens(prompt), namespace="")
    read_all(request, prompt)
    request.accept(same)
    assert proposed(request) == (own[:31], DraftSource.HISTORY)
    request = drafts.start(as_tokens(words(9)), namespace="other")
    read_all(request, words(9))
    request.accept(same)
    assert proposed(request) == ([], None)


def test_what_was_said_before_the_start_is_read_in_few_steps_and_once() -> None:
    texts = [stored(words(EARLIER_TOKENS // 4)) for _ in range(4)]
    asked: list[str] = []

    def earlier(namespace: str) -> list[StoredText]:
        asked.append(namespace)
        return texts

    drafts, prompt = free_drafts(earlier=earlier), words(30)
    request = drafts.start(as_tokens(prompt), namespace="")
    held = drafts.nbytes
    assert held >= EARLIER_TOKENS * 4
    before = 0
    while request.num_read < len(prompt):
        request.read_prompt(len(prompt))
        assert drafts.namespace("").history.end - before <= 5 * 4096 + 10
        before = drafts.namespace("").history.end
    assert read_all(drafts.start(as_tokens(prompt), namespace=""), prompt) == 1
    assert asked == [""]
    request.accept(texts[2].tokens[100:108].tolist())
    assert proposed(request)[0][:4] == texts[2].tokens[108:112].tolist()
    drafts.check()


def test_what_is_not_known_at_the_start_is_looked_up_again_and_what_is_cleared_is_not_read() -> None:
    text, prompt = words(300), words(30)
    known: list[list[StoredText] | None] = [None, [stored(text)], []]
    drafts = free_drafts(earlier=lambda namespace: known.pop(0))
    read_all(drafts.start(as_tokens(prompt), namespace=""), prompt)
    request = drafts.start(as_tokens(prompt), namespace="")
    drafts.clear("")
    read_all(request, prompt)
    request.accept(text[100:108])
    assert proposed(request) == ([], None)
    read_all(drafts.start(as_tokens(prompt), namespace=""), prompt)
    assert known == []


def test_a_text_goes_on_behind_the_block_that_a_newer_one_has_too() -> None:
    shared, newer, older = words(512), words(60), words(60)
    texts = [stored([*shared, *newer]), stored([*shared, *older], start=512)]
    drafts, prompt = free_drafts(earlier=lambda namespace: texts), words(30)
    request = drafts.start(as_tokens(prompt), namespace="")
    read_all(request, prompt)
    # Only the end of what is shared is there twice.
    assert drafts.namespace("").history.end < 512 + 60 + 60 + 30 + 3 * 10
    request.accept([*shared[500:], older[0], older[1]])
    assert proposed(request)[0] == older[2:33]


def test_what_is_held_is_bounded() -> None:
    drafts = Drafts(rewinds=True)
    long = as_tokens(RNG.integers(0, 50_000, 600_000))
    for number in range(8):
        namespace = drafts.namespace(f"number {number}")
        namespace.history.append(long)
    drafts.start(as_tokens(words(20)), namespace="last")
    assert drafts.nbytes <= MOST_NBYTES
    assert drafts.status().nbytes == drafts.nbytes


def test_nothing_is_drafted_before_the_cost_of_a_token_is_known_or_where_there_is_no_room() -> None:
    prompt = words(300)
    for drafts, most in ((Drafts(rewinds=True), 31), (free_drafts(), 0)):
        for _ in range(2):
            request = begin(drafts, prompt)
            request.accept(prompt[100:108])
            assert proposed(request, most=most) == ([], None)
            request.end()


def test_drafts_that_are_wrong_are_no_longer_made() -> None:
    drafts = Drafts(rewinds=True)
    for size, seconds in ((1, 0.01), (2, 0.015), (4, 0.025)):
        for _ in range(4):
            drafts.costs.note(size, seconds)
    file = words(5000)
    request = begin(drafts, file)
    tries = 0
    for at in range(100, 4900, 10):
        request.accept(file[at : at + 8])
        draft = propose(alone(request))[0]
        if draft is not None:
            tries += 1
            note(alone(request), [draft], [1], seconds=0.015)
    assert 0 < tries < 5


def test_what_is_not_worth_a_pass_is_learnt_from_all_the_same() -> None:
    drafts = Drafts(rewinds=True)
    for size, seconds in ((1, 0.01), (2, 0.016), (4, 0.018), (8, 0.02)):
        for _ in range(4):
            drafts.costs.note(size, seconds)
    file = words(5000)

    def rate(*, follows: bool) -> float:
        """After matches of three tokens that are followed by the same token, or by another."""
        request = begin(drafts, file)
        for at in range(100, 1000, 10):
            request.accept([0, *file[at : at + 3]])
            propose(alone(request, most=1))[0]
            note(alone(request), [None], [1], seconds=0.01)
            request.accept([file[at + 3] if follows else 1])
        return drafts.rates.of(DraftSource.HISTORY, 3)

    before = drafts.rates.of(DraftSource.HISTORY, 3)
    assert rate(follows=True) > 0.9 > before
    assert rate(follows=False) < before
    assert drafts.num_drafted.total() == 0


def test_what_a_grammar_forces_is_drafted_unless_more_is_known_that_begins_with_it() -> None:
    drafts = free_drafts()
    other = begin(drafts, [1, 2, 3, 4, 50, 51, 52, 53, 77, *words(10)])
    other.end()
    request = begin(drafts, [*words(20), 1, 2, 3, 4])
    known = propose(alone(request, most=4, forced=[50, 51]))[0]
    assert known is not None and (known.tokens.tolist(), known.source) == ([50, 51, 52, 53], DraftSource.HISTORY)
    for forced in ((50, 60), [60, 61, 62], [50, 51, 52, 53, 77, 80]):
        draft = propose(alone(request, most=6, forced=forced))[0]
        assert draft is not None and draft.source == DraftSource.GRAMMAR
        assert draft.tokens.tolist() == list(forced)


def test_an_answer_that_repeats_nothing_is_seldom_looked_up_until_it_repeats_something() -> None:
    drafts = free_drafts()
    # Drawn by itself, whatever ran before: a collision could hide the first repeat that is looked up.
    drawn = [int(token) for token in np.random.default_rng(11).integers(0, 50_000, 1200)]
    file, new, last = drawn[:900], drawn[900:1100], drawn[1100:1108]
    history = count_lookups(drafts)
    request = begin(drafts, file)
    for token in new:
        request.accept([token])
        assert proposed(request) == ([], None)
    assert 60 <= history.num_lookups <= 80
    at = 100
    while (draft := propose(alone(request))[0]) is None:
        request.accept([file[at]])
        at += 1
    assert at <= 105, at
    request.accept([*draft.tokens.tolist(), 0])
    note(alone(request), [draft], [32], seconds=0.01)
    history.num_lookups = 0
    for token in last:
        request.accept([token])
        propose(alone(request))[0]
    assert history.num_lookups == 8


def step(request: RequestDrafts) -> Draft | None:
    """As the loop does: it looks for nothing while the request is idle."""
    if request.is_idle:
        request.skip()
        return None
    draft = propose(alone(request))[0]
    note(alone(request), [draft], [1 if draft is None else 1 + len(draft.tokens)], seconds=0.01)
    return draft


def test_most_steps_do_nothing_where_nothing_repeats_until_something_does() -> None:
    drafts, file = free_drafts(), list(range(1000, 1900))
    request = begin(drafts, file)
    history, num_done = count_lookups(drafts), 0
    history.append(as_tokens(file))
    for token in range(5000, 5400):
        num_done += not request.is_idle
        assert step(request) is None
        request.accept([token])
    assert num_done == history.num_lookups <= 32 + 224 // 4 + 144 // 16 + 1
    at = 300
    while (draft := step(request)) is None:
        request.accept([file[at]])
        at += 1
    assert at <= 316 and draft.tokens.tolist() == file[at : at + 31]
    request.accept(draft.tokens.tolist())
    assert not request.is_idle
    # Nothing is idle before the prompt is read: its text is still to be looked up.
    unread = drafts.start(as_tokens(words(20_000)), namespace="")
    for token in range(6000, 6040):
        assert step(unread) is None and not unread.is_idle
        unread.accept([token])


class Computed:
    """Drafts of which each token takes so long."""

    source, match, is_ready = DraftSource.HEAD, 0, True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_asked = 0

    @property
    def step_s(self) -> float:
        self.num_asked += 1
        return self.seconds

    def draft(self, num: int) -> Draft | None:
        return Draft(as_tokens([1] * num), self.source, self.match)


def test_what_is_not_worth_computing_is_seldom_asked_for_until_it_is() -> None:
    drafts, computed = free_drafts(), Computed(1.0)
    request = drafts.start(as_tokens(words(9)), namespace="", computed=computed)
    request.read_prompt(9)
    for token in words(1000):
        assert step(request) is None
        request.accept([token])
    # Behind 0, 16, 48, 112, 240, 496 and 752 tokens.
    assert computed.num_asked == 7
    computed.seconds = 0.0
    found = 0
    for token in words(300):
        found += step(request) is not None
        request.accept([token])
    # From the first draft on, one in each step.
    assert found >= 300 - 256


def test_an_answers_last_tokens_say_nothing_of_the_next_answers_drafts() -> None:
    drafts, computed = free_drafts(), Computed(1.0)
    for num_asked, most in ((1, 3), (2, 40), (2, 40)):
        request = drafts.start(as_tokens(words(9)), namespace="", computed=computed)
        request.read_prompt(9)
        assert propose(alone(request, most=most)) == [None]
        assert computed.num_asked == num_asked


def test_what_is_computed_in_vain_may_lose_a_few_passes_and_then_a_small_share() -> None:
    drafts, lost = free_drafts(), 0.0
    request = drafts.start(as_tokens(words(9)), namespace="", computed=Computed(0.0))
    request.read_prompt(9)
    for token in words(2000):
        if request.is_idle:
            request.skip()
        else:
            draft = propose(alone(request, most=3))[0]
            # However often it is tried again, each time in the hope of a pass that costs nothing more.
            drafts.rates.fade(DraftSource.HEAD, 0, num=1000)
            note(alone(request), [draft], [1], seconds=0.01 if draft is None else 0.015)
            lost += 0.5 if draft is not None else 0
        request.accept([token])
    assert 6 <= lost <= 6 + 0.005 * 2000 + 1


@pytest.mark.parametrize(("search_s", "most"), [(0.0005, 0.0075), (0.00004, 0.0041), (0.002, 0.0105), (1.0, 0.0125)])
def test_looking_up_in_vain_takes_a_small_share_of_the_time(search_s: float, most: float) -> None:
    """Of passes of 10 ms. On a slow device nothing is skipped for it, and a pause counts as one long look-up.

    Where one takes a fifth of a pass, there is little more than one at the beginning of each answer.
    """
    drafts = free_drafts()
    history = count_lookups(drafts)
    taken_s = 0.0
    for start in range(1000, 5000, 25):
        # Short answers: the number of fruitless steps alone skips nothing.
        request = begin(drafts, list(range(100, 400)))
        for token in range(start, start + 25):
            before = history.num_lookups
            assert proposed(request) == ([], None)
            looked_s = search_s * (history.num_lookups - before)
            taken_s += min(looked_s, 0.0025)
            note(alone(request), [None], [1], seconds=0.01, search_s=looked_s)
            request.accept([token])
    assert taken_s / 40.0 <= most, taken_s / 40.0
    assert history.num_lookups == 4000 or search_s > 0.0001
    # One step in 64 looks up even then, so that text that begins to repeat is found.
    drafts.searches.add(-100)
    request, before = begin(drafts, list(range(100, 400))), history.num_lookups
    for token in range(5000, 5128):
        assert proposed(request) == ([], None)
        request.accept([token])
    assert (history.num_lookups - before, drafts.searches.is_overdrawn) == (2, True)
    # What look-ups bring pays for them.
    drafts.note_verified(DraftSource.HISTORY, num=16, num_accepted=16, saved_s=0.1)
    assert not drafts.searches.is_overdrawn


def test_a_step_looks_at_one_namespace_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = words(60)
    drafts = free_drafts()
    for number in range(40):
        read_all(drafts.start(as_tokens(words(30)), namespace=f"number {number}"), words(30))
    request = drafts.start(as_tokens(prompt), namespace="")
    read_all(request, prompt)
    sizes: list[int] = []
    monkeypatch.setattr(Drafts, "nbytes", property(lambda drafts: sizes.append(1) or 0))
    for _ in range(20):
        request.accept(proposed(request)[0][:1] or [5])
        drafts.status()
    assert sum(sizes) <= 1


def test_what_is_told_is_what_was_verified() -> None:
    prompt = words(60)
    drafts = free_drafts()
    request = drafts.start(as_tokens(prompt), namespace="")
    read_all(request, prompt)
    drafts.clear("")
    assert drafts.status().nbytes == 0
    request.accept(prompt[20:28])
    proposed(request)
    assert drafts.status().nbytes == drafts.nbytes > 0
    read_all(request := drafts.start(as_tokens(prompt), namespace=""), prompt)
    told = drafts.status()
    request.accept(prompt[20:28])
    draft = propose(alone(request, most=8))[0]
    assert draft is not None and drafts.status() is told
    note(alone(request), [draft], [3], seconds=0.01)
    assert sum(drafts.status().num_accepted.values()) == 2
    assert sum(drafts.status().num_drafted.values()) == len(draft.tokens)


def rows_of(drafts: Drafts, *, cost: float = 1.0, num_fed: tuple[int, int] = (1, 1)) -> list[DecodingRow]:
    """Two requests, of which the first one repeats its prompt. `cost`: of a pass over several tokens of each."""
    for size in (1, 2, 4, 8, 16, 32, 1):
        for _ in range(4):
            drafts.group(2).costs.note(size, 0.01 * (cost if size > 1 else 1))
    file = words(200)
    repeating, other = begin(drafts, file), begin(drafts, words(100))
    repeating.accept(file[100:108])
    other.accept(words(8))
    return [
        DecodingRow(drafts=each, num_fed=num, most=31) for each, num in zip((repeating, other), num_fed, strict=True)
    ]


def test_what_a_pass_over_several_costs_more_is_paid_by_those_that_had_a_draft() -> None:
    rows = rows_of(free_drafts())
    made = propose(rows, most=32)
    assert [draft is not None for draft in made] == [True, False]
    note(rows, made, [1, 1], seconds=0.02)
    # Twice as long as a single step of both, for one of them.
    assert [row.drafts.saved_s for row in rows] == pytest.approx([-0.02, 0])


def test_what_was_not_run_ahead_for_drafts_is_paid_once_however_many_had_one() -> None:
    drafts = free_drafts()
    rows = rows_of(drafts)
    account = drafts.accounts[DraftSource.HISTORY]
    draft = Draft(as_tokens([1]), DraftSource.HISTORY, 8)
    for made in ([draft, draft], [draft, None]):
        note(rows, made, [2, 2], seconds=0.01)
        before = account.balance
        # Half a pass over a token of each longer than others: that of two.
        note(rows, [None, None], [1, 1], seconds=0.015)
        assert account.balance - before == pytest.approx(-1)
        note(rows, [None, None], [1, 1], seconds=0.015)
        assert account.balance - before == pytest.approx(-1)


def test_two_passes_of_a_step_together_are_no_cost_of_one() -> None:
    drafts = free_drafts()
    rows = rows_of(drafts, num_fed=(3, 1))
    costs = drafts.group(2).costs
    before = costs.relative(3)
    for seconds in (1.0, 1.0, 1.0, 1.0):
        note(rows, [None, None], [1, 1], seconds=seconds)
    for _ in range(4):
        costs.note(1, 0.01)
    assert costs.relative(3) == before


def test_what_is_never_worth_a_pass_together_is_seldom_looked_up() -> None:
    drafts = free_drafts()
    history = count_lookups(drafts)
    rows = rows_of(drafts, cost=100)
    file = words(400)
    repeating = begin(drafts, file)
    repeating.accept(file[10:18])
    rows[0] = DecodingRow(drafts=repeating, num_fed=1, most=31)
    for token in file[18:218]:
        assert propose(rows, most=32) == [None, None]
        repeating.accept([token])
        rows[1].drafts.accept(words(1))
    assert history.num_lookups <= 2 * 80
