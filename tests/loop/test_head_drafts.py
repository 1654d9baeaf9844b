"""A head changes no answer and no reuse, its entries are reused with all others, and it guesses as after a cold run."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reprise.core.backend import DraftSource
from reprise.core.events import Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Job, Thinking
from reprise.core.kinds import Layout
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import TEXTS, DraftAccount, DraftCosts, PassCosts
from reprise.engine.models.companion import with_companion
from reprise.engine.running.live_sequence import LiveSequence
from reprise.loop.worker import Worker
from reprise.memory import Account
from tests.loop.driving import GREEDY, DrivenEngine
from tests.loop.restarts import Restarts
from tests.loop.test_drafts import SAMPLED, FreePasses, OneText
from tests.loop.test_reuse import words
from tests.matrix import now_and_later
from tests.models.headed import headed_model
from tests.models.shared import loaded, nearly

KINDS = [
    "qwen3_5",
    "glm4_moe",
    "llama+gemma3_text",
    "gemma3_text+qwen3_5",
    *(
        pytest.param(each, marks=pytest.mark.matrix)
        for each in (
            "qwen3_next",
            "qwen3_5_moe",
            "deepseek_v3",
            "nemotron_h",
            "llama+llama",
            "qwen3_5+llama",
            "mamba2+qwen3_5",
        )
    ),
]
"""With recurrent layers, whose snapshots have the hidden state, and with attention alone; and companions."""


class FreeHead(DraftCosts):
    def step_s(self, passes: PassCosts) -> float:
        return 0.0


class FreeShortPasses(FreePasses):
    largest = 8  # type: ignore[assignment]


def guess_always(worker: Worker) -> None:
    """Whatever it brings."""
    assert worker.drafts is not None and worker.head is not None
    worker.drafts.costs, worker.head.costs = FreeShortPasses(), FreeHead(relative=0.0)


class OverdrawnAccount(DraftAccount):
    is_overdrawn = True  # type: ignore[assignment]


NO_TEXTS = dict.fromkeys(TEXTS, OverdrawnAccount())
"""Nothing is drafted from text: the head is asked for each draft."""


def guess_each_draft(worker: Worker) -> None:
    guess_always(worker)
    assert worker.drafts is not None
    worker.drafts.accounts |= NO_TEXTS


def with_head(kind: str, **settings: Any) -> DrivenEngine:
    """`kind`: an architecture that has a head, or two, of a model and its companion."""
    if "+" in kind:
        model, companion = kind.split("+")
        settings["load"] = partial(with_companion, loaded(model), nearly(companion, 0.05))
        engine = DrivenEngine(model, drafts="always", **settings)
    else:
        engine = DrivenEngine(headed_model(kind), drafts="always", **settings)
    engine.ask(guess_always)
    return engine


def without_head(kind: str, **settings: Any) -> DrivenEngine:
    if "+" in kind:
        return DrivenEngine(kind.split("+", maxsplit=1)[0], **settings)
    return DrivenEngine(headed_model(kind), mtp="off", **settings)


class Guesses:
    """What heads guess from now on, and what replaces it."""

    def __init__(self) -> None:
        self.real: list[list[int]] = []
        self.first: dict[int, int] = {}
        """The first token of each guess, by its position."""
        self.told: dict[int, int] = {}
        """By position: what is drafted there instead."""
        ACTIONS[Failpoint.GUESSED] = self._replace

    def _replace(self, live: LiveSequence, tokens: list[int]) -> None:
        self.real.append(list(tokens))
        first = live.position + len(live.unfed) + 1
        self.first[first] = tokens[0]
        tokens[:] = [self.told.get(first + at, token) for at, token in enumerate(tokens)]

    def know(self, prompt: Sequence[int], answer: Sequence[int], *, wrong_each: int = 0) -> None:
        """The answer, with a wrong token now and then."""
        self.told = {
            len(prompt) + at: token if wrong_each == 0 or at % wrong_each != wrong_each - 1 else (token + 1) % 256
            for at, token in enumerate(answer)
        }


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[DrivenEngine, DrivenEngine]]:
    """One engine whose head always guesses, and one without its head."""
    drafting = with_head(request.param, max_batch=4)
    plain = without_head(request.param, max_batch=4)
    yield drafting, plain
    drafting.close()
    plain.close()


def layout_of(engine: DrivenEngine) -> Layout:
    return engine.ask(lambda worker: worker.cache.layout)


def num_guessed(engine: DrivenEngine) -> int:
    drafts = engine.loop.status().drafts
    assert drafts is not None
    return drafts.num_drafted[DraftSource.HEAD] + drafts.num_drafted[DraftSource.DRAFT_MODEL]


OPTIONS = [
    {"sampling": GREEDY},
    *now_and_later(
        [{"sampling": replace(SAMPLED, logprobs=1, frequency_penalty=0.3, frequency_context_size=30)}],
        [
            {"sampling": SAMPLED},
            {"sampling": replace(GREEDY, logit_bias={7: 3.0, 9: -100.0}, repetition_penalty=1.2)},
        ],
    ),
    *now_and_later(
        [{"sampling": GREEDY, "thinking": Thinking(start=(3,), end=(4, 6), budget=9, is_open=True)}],
        [{"sampling": SAMPLED, "stop_tokens": frozenset(range(0, 512, 7)), "min_tokens": 12}],
    ),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_answer_is_the_one_without(pair: tuple[DrivenEngine, DrivenEngine], options: dict[str, Any]) -> None:
    drafting, plain = pair
    before = num_guessed(drafting)
    prompt = words(2900, 70)
    expected = plain.cold(prompt, num=24, **options)
    assert drafting.cold(prompt, num=24, **options) == expected
    assert num_guessed(drafting) > before


@pytest.mark.parametrize("wrong_each", [0, 3, 5])
def test_right_guesses_are_taken_and_wrong_ones_undone(
    pair: tuple[DrivenEngine, DrivenEngine], wrong_each: int
) -> None:
    drafting, plain = pair
    prompt = words(2910 + wrong_each, 60)
    expected = plain.run(prompt, num=40)
    guesses = Guesses()
    guesses.know(prompt, expected.tokens, wrong_each=wrong_each)
    answer = drafting.run(prompt, num=40)
    assert answer.tokens == expected.tokens
    if wrong_each == 0:
        assert answer.end.outcome.num_accepted >= 20
    # The next turn resumes behind the answer, whatever became of its last draft.
    following = [*prompt, *answer.tokens, 8, 8, 8]
    ends = [engine.run(following, num=6) for engine in (drafting, plain)]
    assert ends[0].tokens == ends[1].tokens
    assert ends[0].computed == ends[1].computed == 4


def test_behind_a_rejected_guess_the_next_one_is_as_good_as_any(
    pair: tuple[DrivenEngine, DrivenEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent layers are fed again what was right, and it is guessed before that."""
    drafting, plain = pair
    drafts = drafting.ask(lambda worker: worker.drafts)
    assert drafts is not None
    monkeypatch.setattr(drafts, "accounts", {**drafts.accounts, **NO_TEXTS})
    prompt = words(2908, 50)
    expected = plain.cold(prompt, num=40)
    guesses = Guesses()
    guesses.know(prompt, expected, wrong_each=3)
    assert drafting.cold(prompt, num=40) == expected
    text = [*prompt, *expected]
    assert len(guesses.first) >= 6
    ACTIONS.clear()
    for at, token in guesses.first.items():
        assert token == drafting.ask(partial(guessed_behind, text=text[:at])), at


def test_a_head_that_did_not_guess_for_a_while_guesses_as_after_a_cold_run() -> None:
    """Of two requests together, and alone; what it did not follow meanwhile was written before it was stored."""
    prompts = [words(2912, 40), words(2913, 70)]

    def rest(worker: Worker) -> None:
        assert worker.drafts is not None
        worker.drafts.accounts[DraftSource.HEAD].balance = -1e9

    def wake(worker: Worker) -> None:
        assert worker.drafts is not None
        worker.drafts.accounts[DraftSource.HEAD].balance = 0.0

    with closing(with_head("qwen3_5", max_batch=4)) as engine:
        engine.ask(guess_each_draft)
        engine.ask(rest)
        ended = [each.wait() for each in engine.submit_all(prompts, num=30)]
        ended.append(engine.run(prompts[0], num=20))
        assert num_guessed(engine) == 0
        texts = [[*job.job.prompt.tokens.tolist(), *job.tokens] for job in ended]
        engine.ask(wake)
        warm: list[list[list[int]]] = []
        for text in texts:
            guesses = Guesses()
            warm.append([engine.run([*text, 5, 6], num=12).tokens, *guesses.real])
    with closing(with_head("qwen3_5")) as engine:
        engine.ask(guess_each_draft)
        for text, guessed in zip(texts, warm, strict=True):
            guesses = Guesses()
            assert [engine.run([*text, 5, 6], num=12).tokens, *guesses.real] == guessed


def guessed_behind(worker: Worker, text: Sequence[int]) -> int:
    """What is guessed behind a text that was computed at once."""
    job = Job(id="it", prompt=Prompt(tokens=as_tokens(text)), max_tokens=9, sampling=GREEDY)
    live = worker.runner.begin()
    worker.runner.prefill([live], [as_tokens(text[:-1])])
    worker.runner.begin_decode(live, job)
    try:
        return worker.runner.guess(live, 1)[0]
    finally:
        worker.runner.drop(live)


def test_what_a_grammar_allows_is_all_that_comes(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, _ = pair
    text = words(2905, 40)
    assert drafting.run(words(2906, 30), num=len(text), constraint=lambda: OneText(text)).tokens == text


@pytest.mark.parametrize("seed", now_and_later([0], [1, 2]))
def test_conversations_are_answered_as_without_and_computed_as_little(
    pair: tuple[DrivenEngine, DrivenEngine], seed: int
) -> None:
    rng = random.Random(seed)
    drafting, plain = pair
    chats = [words(2920 + 10 * seed + i, 60) for i in range(2)]
    for turn in range(7):
        number = rng.randrange(len(chats))
        sampling, num = rng.choice([GREEDY, SAMPLED]), rng.choice([1, 2, 9, 24, 40])
        ends: list[tuple[list[int], int, int]] = []
        for engine in (drafting, plain):
            answer = engine.run(chats[number], num=num, sampling=sampling)
            ends.append((answer.tokens, answer.end.outcome.num_reused, answer.computed))
        assert ends[0][0] == ends[1][0]
        # A companion with layers of other kinds has its own say in where to resume.
        assert ends[0] == ends[1] or layout_of(drafting) != layout_of(plain)
        chats[number] = [*chats[number], *ends[0][0], *words(3000 + turn, rng.choice([1, 20, 60]))]
        if rng.random() < 0.3:
            chats[number] = chats[number][: len(chats[number]) // 2]


def test_requests_that_come_and_go_have_the_answers_that_they_have_alone(
    pair: tuple[DrivenEngine, DrivenEngine],
) -> None:
    drafting, plain = pair
    prompts = [words(2950, 80), [*words(2950, 80), 5, 6], words(2951, 50)]
    expected = [plain.cold(prompt, num=24, sampling=SAMPLED) for prompt in prompts]
    for _ in range(2):
        running = [drafting.submit(prompt, num=24, sampling=SAMPLED) for prompt in prompts]
        running[2].wait_for(Sampled)
        drafting.loop.cancel(running[2].job.id)
        answers = [each.wait().tokens for each in running]
        assert answers[:2] == expected[:2]
        assert answers[2] == expected[2][: len(answers[2])]
    drafting.ask(lambda worker: worker.check())


def test_after_a_restore_the_head_guesses_as_after_a_cold_run(start: Restarts) -> None:
    """Exact repeat, next turn and branch, from memory and from disk."""
    prompt = words(2960, 100)
    with closing(with_head("qwen3_5")) as engine:
        engine.ask(guess_each_draft)
        said = [*prompt, *engine.run(prompt, num=12).tokens]
    asked = {"repeat": prompt, "turn": [*said, *words(2961, 30)], "another turn": [*said, 9, 9, 9]}
    cold: dict[str, list[list[int]]] = {}
    for name, each in asked.items():
        with closing(with_head("qwen3_5")) as engine:
            engine.ask(guess_each_draft)
            guesses = Guesses()
            engine.run(each, num=12)
            cold[name] = list(guesses.real)
    for name, each in asked.items():
        for is_restarted in (False, True):
            engine = start(headed_model("qwen3_5"), drafts="always")
            engine.ask(guess_each_draft)
            engine.run(prompt, num=12)
            if is_restarted:
                engine = start(headed_model("qwen3_5"), drafts="always")
                engine.ask(guess_each_draft)
            guesses = Guesses()
            answer = engine.run(each, num=12)
            assert guesses.real == cold[name], name
            if name != "repeat" or not is_restarted:
                assert answer.end.outcome.num_reused >= 100
            assert (answer.end.outcome.num_loaded > 0) == (is_restarted and name != "repeat")


def test_records_with_a_head_are_not_for_the_model_without(start: Restarts) -> None:
    prompt = words(2970, 200)
    for number, mtp in enumerate(("auto", "off", "auto", "off")):
        answer = start(headed_model("qwen3_5"), mtp=mtp, drafts="always").run(prompt, num=4)
        assert (answer.end.outcome.num_loaded > 0) == (number > 1), mtp
        if number == 1:
            prompt = [*prompt, *answer.tokens, 5, 6]


@pytest.mark.parametrize("num_told", [4, 5, 6])
def test_what_a_failed_answer_left_unfed_is_not_fed_for_the_next_request(num_told: int) -> None:
    """Right guesses of a pass that was undone, in a sequence that its prompt's entries are shared with."""
    prompt = words(2965, 60)
    with closing(DrivenEngine(headed_model("qwen3_5"), mtp="off")) as plain:
        answer = plain.run(prompt, num=20).tokens
        following = [*prompt, *words(2966, 9)]
        expected = plain.run(following, num=12).tokens
    left = num_told

    def fail(token: int) -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("the reader is gone")
        return False

    with closing(with_head("qwen3_5", shares_from=40)) as engine:
        Guesses().know(prompt, answer, wrong_each=3)
        ended = engine.run(prompt, num=20, watch=fail)
        assert ended.end.error is not None
        assert engine.ask(lambda worker: len(worker.sequences.idle)) == 1
        again = engine.run(following, num=12)
        assert again.tokens == expected
        assert again.end.outcome.num_reused > 0


@pytest.mark.parametrize("architecture", now_and_later(["qwen3_5"], ["glm4_moe"]))
def test_preempted_requests_are_answered_as_without(architecture: str) -> None:
    with closing(DrivenEngine(headed_model(architecture), mtp="off")) as plain:
        prompts = [words(2980 + i, 300) for i in range(3)]
        expected = [plain.cold(prompt, num=40) for prompt in prompts]
    with closing(DrivenEngine(headed_model(architecture), drafts="always")) as roomy:
        needed = roomy.ask(lambda worker: worker.runner.most_live_nbytes(340, chunk=340))
    with closing(with_head(architecture, cache_bytes=needed * 2)) as tight:
        for _ in range(2):
            assert [each.wait().tokens for each in tight.submit_all(prompts, num=40)] == expected
        tight.ask(lambda worker: worker.check())


@pytest.mark.matrix
def test_a_head_that_is_never_right_costs_next_to_nothing() -> None:
    with closing(DrivenEngine(headed_model("qwen3_5"), drafts="always")) as engine:

        def cost_a_quarter(worker: Worker) -> None:
            assert worker.drafts is not None and worker.head is not None

            class Quarter(DraftCosts):
                def step_s(self, passes: PassCosts) -> float:
                    return passes.one_s / 4

            worker.drafts.costs, worker.head.costs = FreeShortPasses(), Quarter(relative=0.25)

        engine.ask(cost_a_quarter)
        guesses = Guesses()
        guesses.told = dict.fromkeys(range(10_000), 0)
        num = 1000
        answer = engine.run(words(2990, 100), num=num, sampling=SAMPLED)
        drafted = answer.end.outcome.drafted[DraftSource.HEAD]
        assert drafted.num_accepted <= 5
        cost = num - answer.end.outcome.num_accepted + drafted.num / 4
        assert num / cost >= 0.98


@pytest.mark.parametrize("kind", ["qwen3_5", "llama+gemma3_text"])
@pytest.mark.parametrize("room", [4_000_000, 0])
def test_guesses_are_charged_while_they_are_made_and_there_are_none_where_they_do_not_fit(kind: str, room: int) -> None:
    prompt = words(2990, 100)
    with closing(without_head(kind)) as plain:
        expected = plain.run(prompt, num=24).tokens
    charged: list[int] = []
    prices: list[int] = []
    with closing(with_head(kind, cache_bytes=4_000_000)) as engine:
        worker: Worker = engine.ask(lambda worker: worker)

        def look(live: LiveSequence, tokens: list[int]) -> None:
            charged.append(worker.memory.nbytes(Account.PASSES))
            assert charged[-1] == prices[-1] - 10_000 > 0

        ACTIONS[Failpoint.GUESSED] = look
        price = worker.executor.price_to_guess
        assert worker.head is not None

        def dear(live: LiveSequence, num: int) -> int:
            prices.append(price(live, num) if room > 0 else 10**9)
            return prices[-1]

        engine.ask(guess_each_draft)
        engine.ask(lambda worker: setattr(worker.memory, "kept_for_passes", 10_000))
        engine.ask(lambda worker: setattr(worker.head, "price", dear))
        assert engine.run(prompt, num=24).tokens == expected
        assert (len(charged) > 0) == (room > 0)
        assert worker.memory.nbytes(Account.PASSES) == 0


def test_what_guesses_take_grows_with_their_number_and_with_the_entries_that_wait() -> None:
    with closing(with_head("qwen3_5")) as engine:
        executor = engine.ask(lambda worker: worker.executor)

    def price(num: int, num_waiting: int) -> int:
        rows = SimpleNamespace(hidden=SimpleNamespace(waiting=[None] * num_waiting))
        live = cast(LiveSequence, SimpleNamespace(position=500, unfed=(1, 2), rows=rows))
        return executor.price_to_guess(live, num)

    for num, num_waiting in ((1, 0), (4, 0), (1, 200)):
        guesses = executor.price.of(3 + num, 500, num_outputs=3 + num, num_decoding=1)
        assert price(num, num_waiting) == guesses + (executor.price.of(200, 0) if num_waiting > 0 else 0)


def test_without_drafts_the_head_is_not_loaded() -> None:
    with closing(DrivenEngine(headed_model("qwen3_5"), drafts="off")) as engine:
        assert engine.model.head is None
        assert engine.ask(lambda worker: worker.head) is None


@pytest.mark.parametrize("background", ["auto", "never", "always"])
def test_nothing_guesses_on_a_machine_that_is_left_alone(background: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.quiet.MACHINE.reason", "hot")
    with closing(with_head("qwen3_5", background=background)) as engine:
        drafted = engine.run(words(2990, 60), num=16).end.outcome.drafted
        assert ("head" in drafted) == (background == "always")
