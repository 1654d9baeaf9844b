"""Drafts change no answer and no reuse, whoever comes, goes, stops or is preempted meanwhile."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from reprise.core.backend import DraftSource
from reprise.core.events import FinishReason, Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Sampling, Thinking
from reprise.drafts.benefit import PASS_SIZES, PassCosts
from reprise.drafts.drafter import GroupPasses
from reprise.drafts.history import TextEnd
from reprise.engine.states.sequence_batch import SequenceBatch
from reprise.loop.worker import Worker
from tests.loop.driving import GREEDY, DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words
from tests.matrix import now_and_later

SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=11)


class FreePasses(PassCosts):
    """As on a device where a pass over many tokens costs as much as one over a single token: every draft is tried.

    It is a slow one, beside which looking up costs nothing, however busy the machine is.
    """

    is_known = True  # type: ignore[assignment]
    one_s = 1.0  # type: ignore[assignment]
    largest = max(PASS_SIZES)  # type: ignore[assignment]
    wants_single = False  # type: ignore[assignment]

    def note(self, num_tokens: int, seconds: float) -> None:
        pass

    def relative_of(self, num_tokens: int, seconds: float) -> float:
        return 1.0

    def relative(self, num_tokens: int) -> float:
        return 1.0


def make_passes_free(worker: Worker) -> None:
    assert worker.drafts is not None
    worker.drafts.costs = FreePasses()
    worker.drafts.groups = {num: GroupPasses(PASS_SIZES, FreePasses()) for num in range(2, 5)}


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5", "mamba2"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[DrivenEngine, DrivenEngine]]:
    """One engine that drafts whatever it can, and one that never does."""
    drafting = DrivenEngine(request.param, max_batch=4, drafts="always")
    plain = DrivenEngine(request.param, max_batch=4)
    drafting.ask(make_passes_free)
    yield drafting, plain
    drafting.close()
    plain.close()


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": GREEDY},
        *now_and_later(
            [{"sampling": replace(SAMPLED, logprobs=1, frequency_penalty=0.3, frequency_context_size=30)}],
            [
                {"sampling": SAMPLED},
                {"sampling": GREEDY, "thinking": Thinking(start=(3,), end=(4, 6), budget=9, is_open=True)},
                {"sampling": SAMPLED, "stop_tokens": frozenset(range(0, 512, 7)), "min_tokens": 12},
            ],
        ),
    ],
)
def test_an_answer_that_is_asked_for_again_is_drafted_from_the_first(
    pair: tuple[DrivenEngine, DrivenEngine], options: dict[str, Any]
) -> None:
    drafting, plain = pair
    prompt = words(700, 90)
    expected = plain.run(prompt, num=32, **options)
    first = drafting.run(prompt, num=32, **options)
    again = drafting.run(prompt, num=32, **options)
    assert first.tokens == again.tokens == expected.tokens
    assert again.end.reason is expected.end.reason
    outcome = again.end.outcome
    assert outcome.num_accepted >= len(expected.tokens) // 2
    assert outcome.num_drafted >= outcome.num_accepted
    pairs = zip(sampled(again), sampled(expected), strict=True)
    assert all(mine.logprob == pytest.approx(other.logprob, abs=1e-3) for mine, other in pairs)


def sampled(running: SubmittedJob) -> list[Sampled]:
    return [event for event in running.events if isinstance(event, Sampled)]


@pytest.mark.parametrize("seed", now_and_later([0], [1, 2]))
def test_conversations_are_answered_as_without_drafts_and_computed_as_little(
    pair: tuple[DrivenEngine, DrivenEngine], seed: int
) -> None:
    rng = random.Random(seed)
    drafting, plain = pair
    chats = [words(720 + i, 60) for i in range(2)]
    for turn in range(8):
        number = rng.randrange(len(chats))
        sampling = rng.choice([GREEDY, SAMPLED])
        num = rng.choice([1, 2, 9, 24])
        ends: list[tuple[list[int], int, int]] = []
        for engine in (drafting, plain):
            answer = engine.run(chats[number], num=num, sampling=sampling)
            ends.append((answer.tokens, answer.end.outcome.num_reused, answer.computed))
        assert ends[0] == ends[1]
        # Tool results and edits repeat what was said.
        said = [*chats[number], *ends[0][0]]
        at = rng.randrange(len(said) // 2)
        chats[number] = [*said, *said[at : at + 20], *words(800 + turn, 5)]
        if rng.random() < 0.3:
            chats[number] = chats[number][: len(chats[number]) // 2]


def test_the_next_turn_resumes_behind_an_answer_whose_last_draft_was_wrong(
    pair: tuple[DrivenEngine, DrivenEngine],
) -> None:
    drafting, plain = pair
    prompt = words(740, 70)
    answer = drafting.run(prompt, num=20)
    branch = drafting.run([*prompt, 9, 9], num=20)
    assert branch.tokens == plain.cold([*prompt, 9, 9], num=20)
    following = [*prompt, *answer.tokens, 8, 8, 8]
    following_end = drafting.run(following, num=4)
    assert following_end.computed == 4
    assert following_end.tokens == plain.cold(following, num=4)


def test_requests_that_come_and_go_have_the_answers_that_they_have_alone(
    pair: tuple[DrivenEngine, DrivenEngine],
) -> None:
    drafting, plain = pair
    prompts = [words(750, 80), [*words(750, 80), 5, 6], words(751, 50), words(752, 120)]
    expected = [plain.cold(prompt, num=24, sampling=SAMPLED) for prompt in prompts]
    for _ in range(2):
        running = [drafting.submit(prompt, num=24, sampling=SAMPLED) for prompt in prompts]
        running[2].wait_for(Sampled)
        drafting.loop.cancel(running[2].job.id)
        answers = [each.wait() for each in running]
        for number in (0, 1, 3):
            assert answers[number].tokens == expected[number]
        assert answers[2].tokens == expected[2][: len(answers[2].tokens)]
    drafting.check()


@pytest.mark.parametrize("sampling", now_and_later([SAMPLED], [GREEDY]))
def test_requests_that_decode_together_are_drafted_for_in_one_pass(
    pair: tuple[DrivenEngine, DrivenEngine], sampling: Sampling
) -> None:
    drafting, plain = pair
    passes: list[tuple[int, int]] = []

    def note(rows: SequenceBatch, tokens: mx.array) -> None:
        passes.append(tuple(tokens.shape))

    prompts = [words(755, 80), words(756, 70)]
    expected = [plain.cold(prompt, num=48, sampling=sampling) for prompt in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        assert drafting.run(prompt, num=48, sampling=sampling).tokens == answer
    ACTIONS[Failpoint.FORWARD] = note
    again = [each.wait() for each in drafting.submit_all(prompts, num=48, sampling=sampling)]
    assert [each.tokens for each in again] == expected
    together = [num for rows, num in passes if rows == 2]
    # The 94 tokens behind the first ones take 47 passes without drafts, and a tenth of them with these.
    assert len(together) <= 10 and max(together) > 8, passes
    assert all(each.end.outcome.num_accepted > 30 for each in again)
    drafting.check()


def test_a_request_that_repeats_nothing_keeps_no_other_from_its_drafts(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, plain = pair
    known, new = words(757, 80), words(758, 70)
    expected = [plain.cold(prompt, num=40, sampling=SAMPLED) for prompt in (known, new)]
    drafting.run(known, num=40, sampling=SAMPLED)
    both = [each.wait() for each in drafting.submit_all([known, new], num=40, sampling=SAMPLED)]
    assert [each.tokens for each in both] == expected
    assert both[0].end.outcome.num_accepted > 24
    drafting.check()


def test_a_prompt_is_read_before_its_first_token(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, _ = pair
    prompt = words(759, 40)
    drafting.run(prompt, num=1)

    def found(worker: Worker) -> list[int]:
        assert worker.drafts is not None
        continuation = worker.drafts.namespace("").history.find(TextEnd(prompt[:8]), num=4)
        return [] if continuation is None else continuation.tokens.tolist()

    assert drafting.ask(found) == prompt[8:12]


class OneText:
    """A grammar that allows one text alone, and foretells it but for a token in five."""

    def __init__(self, text: list[int]) -> None:
        self.rest = list(text)

    def allowed(self) -> npt.NDArray[np.uint32]:
        mask = np.zeros(16, dtype=np.uint32)
        mask[self.rest[0] // 32] = np.uint32(1) << np.uint32(self.rest[0] % 32)
        return mask

    def accept(self, token: int) -> None:
        assert token == self.rest.pop(0)

    def forced(self) -> list[int]:
        return [token if len(self.rest) % 5 else 3 for token in self.rest[:7]]


def test_what_a_grammar_forces_is_drafted(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, _ = pair
    text = words(791, 40)
    answer = drafting.run(words(790, 30), num=len(text), constraint=lambda: OneText(text))
    assert answer.tokens == text
    assert drafting.ask(lambda worker: worker.drafts.num_accepted[DraftSource.GRAMMAR]) > 15  # type: ignore[union-attr]


class SeldomForeseen(OneText):
    """One that foretells two tokens of four."""

    def forced(self) -> list[int]:
        return self.rest[:2] if len(self.rest) % 4 == 0 else []


def test_a_grammar_is_asked_in_each_step_also_where_looking_up_brings_nothing() -> None:
    with closing(DrivenEngine("llama", drafts="always")) as engine:

        def rest(worker: Worker) -> None:
            assert worker.drafts is not None
            make_passes_free(worker)
            worker.drafts.searches.add(-100)

        engine.ask(rest)
        text = words(797, 60)
        answer = engine.run(words(798, 30), num=len(text), constraint=lambda: SeldomForeseen(text))
        assert answer.tokens == text and answer.end.outcome.num_accepted >= 20


class Unforeseen(OneText):
    """One that says nothing of what comes."""

    def forced(self) -> list[int]:
        return []


def test_an_answer_that_changes_values_of_an_earlier_one_is_drafted_between_them(
    pair: tuple[DrivenEngine, DrivenEngine],
) -> None:
    drafting, plain = pair
    prompt, call = words(792, 30), words(793, 60)
    changed = [*call[:20], *words(794, 3), *call[24:40], *words(795, 5), *call[42:]]
    first = drafting.run(prompt, num=len(call), constraint=lambda: Unforeseen(call))
    assert first.tokens == call
    prompt += [*call, *words(796, 12)]
    second = drafting.run(prompt, num=len(changed), constraint=lambda: Unforeseen(changed))
    assert second.tokens == changed
    # The first token, the eight of the values and the first behind each; a draft may begin with one that was sampled.
    assert second.end.outcome.num_accepted >= len(changed) - 16
    following = [*prompt, *changed, 8, 8, 8]
    assert drafting.run(following, num=8, sampling=SAMPLED).tokens == plain.cold(following, num=8, sampling=SAMPLED)


def test_an_answer_stops_where_it_is_told_to_in_the_middle_of_a_draft(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, plain = pair
    prompt = words(760, 60)
    expected = plain.cold(prompt, num=30)
    drafting.run(prompt, num=30)
    for length in (1, 5, 17):
        seen: list[int] = []
        stopped = drafting.run(prompt, num=30, watch=lambda token, n=length, s=seen: s.append(token) or len(s) == n)
        assert (stopped.tokens, stopped.end.reason) == (expected[:length], FinishReason.STOP)
        assert seen == expected[:length]
        following = drafting.run([*prompt, *expected[:length], 7, 7], num=6)
        # What was taken of the draft is stored: the last token alone is fed with the new ones.
        assert following.computed <= 3
        assert following.tokens == plain.cold([*prompt, *expected[:length], 7, 7], num=6)


def test_what_is_cleared_and_what_other_keys_said_is_not_drafted_from(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, _ = pair
    prompt = words(770, 300)
    first = drafting.run(prompt, num=24, namespace="mine", sampling=SAMPLED)
    status = drafting.loop.status().drafts
    assert status is not None and status.nbytes > 0
    other = drafting.run(prompt, num=24, namespace="theirs", sampling=SAMPLED)
    assert first.tokens == other.tokens
    from_mine = drafting.run(prompt, num=24, namespace="mine", sampling=SAMPLED)
    assert from_mine.end.outcome.num_accepted > other.end.outcome.num_accepted
    drafting.loop.clear("mine").result()
    assert drafting.run(prompt, num=24, namespace="mine", sampling=SAMPLED).end.outcome.num_accepted == (
        other.end.outcome.num_accepted
    )


def test_a_prediction_is_drafted_from(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, plain = pair
    prompt = words(780, 60)
    expected = plain.cold(prompt, num=24, sampling=SAMPLED)
    wrong = [*expected[:10], 1, 2, 3, *expected[10:]]
    for prediction in (expected, wrong, [1, 2, 3]):
        drafting.loop.clear().result()
        answer = drafting.run(prompt, num=24, sampling=SAMPLED, prediction=prediction)
        assert answer.tokens == expected
        if prediction is not wrong:
            assert (answer.end.outcome.num_accepted > 15) == (prediction is expected)


@pytest.mark.matrix
def test_a_preempted_answer_goes_on_as_without_drafts() -> None:
    plain = DrivenEngine("qwen3_5", drafts="off")
    prompts = [words(790 + i, 300) for i in range(3)]
    expected = [plain.cold(prompt, num=40) for prompt in prompts]
    plain.close()
    # Room for one and a half.
    tight = DrivenEngine("qwen3_5", cache_bytes=1_200_000, drafts="always")
    tight.ask(make_passes_free)
    for _ in range(2):
        assert [each.wait().tokens for each in tight.submit_all(prompts, num=40)] == expected
    tight.close()


def test_no_draft_is_made_where_they_are_off() -> None:
    engine = DrivenEngine("llama", drafts="off")
    prompt = words(795, 60)
    first, again = engine.run(prompt, num=24), engine.run(prompt, num=24)
    assert first.tokens == again.tokens
    assert again.end.outcome.num_drafted == 0
    assert engine.loop.status().drafts is None
    engine.close()
