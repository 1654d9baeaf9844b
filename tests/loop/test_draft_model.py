"""A draft model changes no answer and no reuse, and computes nothing of a chat twice itself."""

import random
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.backend import DraftModelStatus, DraftSource
from reprise.core.errors import LoadFailed
from reprise.core.events import Finished, Sampled
from reprise.core.job import Thinking
from reprise.core.settings import Settings
from reprise.core.tokens import Tokens
from reprise.drafts.benefit import DraftCosts, PassCosts
from reprise.loop.draft_following import DraftAccount
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import SharedMemory
from tests.loop.driving import GREEDY, PATIENCE_S, DrivenEngine
from tests.loop.test_drafts import SAMPLED, FreePasses, OneText
from tests.loop.test_reuse import words
from tests.matrix import now_and_later
from tests.models.shared import loaded, nearly

PAIRS = [
    ("llama", "qwen3_5"),
    ("qwen3_5", "gemma3_text"),
    ("gemma3_text", "llama"),
    pytest.param(("llama", "llama"), marks=pytest.mark.matrix),
    pytest.param(("gemma3_text", "gemma3_text"), marks=pytest.mark.matrix),
    pytest.param(("mamba2", "qwen3_5"), marks=pytest.mark.matrix),
    pytest.param(("qwen3_5", "mamba2"), marks=pytest.mark.matrix),
]
"""Every kind of layer on both sides."""


class FreeModel(DraftCosts):
    """As where the draft model costs nothing: it always drafts."""

    def step_s(self, passes: PassCosts) -> float:
        return 0.0

    def token_s(self, passes: PassCosts) -> float:
        return 0.0


class FreeShortPasses(FreePasses):
    """A draft of seven tokens shows what one of 31 shows, and most of those are computed for nothing."""

    largest = 8  # type: ignore[assignment]


def draft_always(worker: Worker, *, is_far: bool = False) -> None:
    """`is_far`: as many tokens as there may be."""
    assert worker.drafts is not None and worker.draft_model is not None
    worker.drafts.costs = FreePasses() if is_far else FreeShortPasses()
    worker.draft_model.costs = FreeModel(relative=0.0)


def with_draft_model(architecture: str, drafting: str, *, noise: float = 0.05, **settings: Any) -> DrivenEngine:
    engine = DrivenEngine(architecture, load_draft_model=partial(nearly, drafting, noise), drafts="auto", **settings)
    engine.ask(draft_always)
    return engine


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[DrivenEngine, DrivenEngine]]:
    """One engine with a draft model that always drafts, and one without."""
    drafting, plain = with_draft_model(*request.param, max_batch=4), DrivenEngine(request.param[0], max_batch=4)
    yield drafting, plain
    drafting.close()
    plain.close()


def status(engine: DrivenEngine) -> DraftModelStatus:
    drafts = engine.loop.status().drafts
    assert drafts is not None and drafts.model is not None
    return drafts.model


def num_drafted(engine: DrivenEngine) -> int:
    drafts = engine.loop.status().drafts
    assert drafts is not None
    return drafts.num_drafted[DraftSource.DRAFT_MODEL]


@pytest.mark.parametrize(
    "options",
    [
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
    ],
)
def test_an_answer_is_the_one_without(pair: tuple[DrivenEngine, DrivenEngine], options: dict[str, Any]) -> None:
    drafting, plain = pair
    before = num_drafted(drafting)
    prompt = words(900, 70)
    assert drafting.cold(prompt, num=24, **options) == plain.cold(prompt, num=24, **options)
    assert num_drafted(drafting) > before


def test_what_a_grammar_allows_is_all_that_comes(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, _ = pair
    text = words(905, 40)
    assert drafting.run(words(906, 30), num=len(text), constraint=lambda: OneText(text)).tokens == text


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [0, 1])
def test_conversations_are_answered_as_without_and_computed_as_little(
    pair: tuple[DrivenEngine, DrivenEngine], seed: int
) -> None:
    rng = random.Random(seed)
    drafting, plain = pair
    chats = [words(920 + 10 * seed + i, 60) for i in range(2)]
    for turn in range(7):
        number = rng.randrange(len(chats))
        sampling, num = rng.choice([GREEDY, SAMPLED]), rng.choice([1, 2, 9, 24, 40])
        stop_at = rng.choice([None, None, 5])
        ends: list[tuple[list[int], int, int]] = []
        for engine in (drafting, plain):
            seen: list[int] = []
            watch = None if stop_at is None else lambda token, s=seen, n=stop_at: s.append(token) or len(s) == n
            answer = engine.run(chats[number], num=num, sampling=sampling, watch=watch)
            ends.append((answer.tokens, answer.end.outcome.num_reused, answer.computed))
        assert ends[0] == ends[1]
        chats[number] = [*chats[number], *ends[0][0], *words(1000 + turn, rng.choice([1, 20, 60]))]
        if rng.random() < 0.3:
            chats[number] = chats[number][: len(chats[number]) // 2]


def test_requests_that_come_and_go_have_the_answers_that_they_have_alone(
    pair: tuple[DrivenEngine, DrivenEngine],
) -> None:
    drafting, plain = pair
    prompts = [words(950, 80), [*words(950, 80), 5, 6], words(951, 50)]
    expected = [plain.cold(prompt, num=24, sampling=SAMPLED) for prompt in prompts]
    for _ in range(2):
        running = [drafting.submit(prompt, num=24, sampling=SAMPLED) for prompt in prompts]
        running[2].wait_for(Sampled)
        drafting.loop.cancel(running[2].job.id)
        answers = [each.wait().tokens for each in running]
        assert answers[:2] == expected[:2]
        assert answers[2] == expected[2][: len(answers[2])]
    drafting.check()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_the_draft_model_computes_what_is_new_and_nothing_else(architecture: str) -> None:
    """The same weights: all that it drafts is right, so it takes nothing back."""
    engine = DrivenEngine(architecture, load_draft_model=partial(loaded, architecture), drafts="auto")
    engine.ask(partial(draft_always, is_far=True))
    prompt = words(960, 100)
    before, num_new = status(engine), 100
    for turn in range(4):
        answer = engine.run(prompt, num=30)
        now = status(engine)
        # It is fed what is new, and the tokens of an answer that it has not guessed: the first and the last ones.
        assert num_new <= now.num_prefilled - before.num_prefilled <= num_new + 6
        assert turn == 0 or now.num_reused - before.num_reused >= len(prompt) - num_new - 4
        assert answer.end.outcome.drafted[DraftSource.DRAFT_MODEL].num_accepted >= 24
        prompt, num_new, before = [*prompt, *answer.tokens, *words(970 + turn, 20)], 20, now
    engine.ask(lambda worker: worker.check())
    engine.close()


def test_what_the_draft_model_stored_is_for_its_own_namespace_and_can_be_cleared() -> None:
    engine = with_draft_model("llama", "qwen3_5")
    prompt = words(990, 120)
    engine.run(prompt, num=20, namespace="mine")
    assert status(engine).num_reused == 0
    engine.run(prompt, num=20, namespace="theirs")
    assert status(engine).num_reused == 0
    engine.run([*prompt, 5], num=20, namespace="mine")
    reused = status(engine).num_reused
    assert reused >= 100
    engine.loop.clear("mine").result()
    engine.run([*prompt, 6], num=20, namespace="mine")
    assert status(engine).num_reused == reused
    engine.close()


@pytest.mark.matrix
def test_the_draft_model_gives_way_to_requests_before_any_of_them_does() -> None:
    plain = DrivenEngine("qwen3_5")
    prompts = [words(1010 + i, 300) for i in range(3)]
    expected = [plain.cold(prompt, num=40) for prompt in prompts]
    plain.close()
    # Room for one and a half.
    tight = with_draft_model("qwen3_5", "llama", cache_bytes=1_200_000)
    for _ in range(2):
        assert [each.wait().tokens for each in tight.submit_all(prompts, num=40)] == expected
    assert tight.run(prompts[0], num=40).tokens == expected[0]
    tight.ask(lambda worker: worker.check())
    tight.close()


def test_what_runs_for_the_draft_model_is_given_up_in_the_middle_of_an_answer() -> None:
    plain, engine = DrivenEngine("llama"), with_draft_model("llama", "gemma3_text")
    prompt = words(1020, 100)
    expected = plain.cold(prompt, num=80)
    given_up: list[bool] = []

    def squeeze(worker: Worker) -> None:
        assert worker.draft_model is not None
        given_up.append(worker.draft_model.give_up())
        assert worker.draft_model.runner.num_sequences == 0
        worker.check()

    running = engine.submit(prompt, num=80)
    while not any(given_up) and Finished not in running.kinds:
        engine.ask(squeeze)
    assert running.wait().tokens == expected
    assert any(given_up)
    assert num_drafted(engine) > 0
    plain.close()
    engine.close()


@pytest.mark.matrix
def test_its_weights_go_when_running_requests_have_no_room_otherwise() -> None:
    plain, engine = DrivenEngine("llama"), with_draft_model("llama", "llama")
    prompt = words(1030, 100)
    expected = plain.cold(prompt, num=60)
    assert engine.run(prompt, num=60).tokens == expected
    drafted, weights = num_drafted(engine), status(engine).weights_nbytes
    assert drafted > 0 and weights > 0
    assert engine.loop.status().weights_nbytes == loaded("llama").nbytes + weights
    needed = engine.ask(lambda worker: worker.runner.most_live_nbytes(200, chunk=200))
    engine.ask(lambda worker: worker.set_budget(needed // 2))
    assert engine.run([*prompt, 7], num=60).tokens == plain.cold([*prompt, 7], num=60)
    assert status(engine).weights_nbytes == 0
    assert engine.loop.status().weights_nbytes == loaded("llama").nbytes
    assert engine.inspect().memory.weights_nbytes == loaded("llama").nbytes
    assert engine.ask(lambda worker: worker.memory.budget) == needed // 2 + weights
    # They come back with the model's own, and take their room again.
    engine.loop.dismiss().result(PATIENCE_S)
    assert engine.loop.status().weights_nbytes == 0
    engine.loop.ready().result(PATIENCE_S)
    assert engine.loop.status().weights_nbytes == loaded("llama").nbytes + weights
    assert engine.ask(lambda worker: worker.memory.budget) == needed // 2
    plain.close()
    engine.close()


def test_a_draft_model_that_breaks_ends_no_answer() -> None:
    plain, engine = DrivenEngine("llama"), with_draft_model("llama", "llama")
    prompt = words(1040, 100)

    def break_it(worker: Worker) -> None:
        assert worker.draft_model is not None
        # It has no weights, and nobody knows.
        worker.draft_model.runner.loaded = worker.draft_model.runner.loaded.without_weights()

    engine.ask(break_it)
    assert engine.run(prompt, num=40).tokens == plain.cold(prompt, num=40)
    assert num_drafted(engine) == 0
    engine.ask(lambda worker: worker.check())
    plain.close()
    engine.close()


def test_nothing_is_drafted_where_the_model_costs_more_than_it_saves() -> None:
    engine = DrivenEngine("llama", load_draft_model=partial(nearly, "llama", 0.05), drafts="auto")

    def cost_much(worker: Worker) -> None:
        assert worker.drafts is not None and worker.draft_model is not None
        worker.drafts.costs = FreePasses()
        worker.draft_model.costs = DraftCosts(relative=20.0)

    engine.ask(cost_much)
    engine.run(words(1050, 60), num=40)
    assert num_drafted(engine) == 0
    assert status(engine).num_prefilled == 0
    engine.close()


class Quarter(DraftCosts):
    """As a model of a quarter of the size: a token takes a quarter of a pass, and an eighth of that in a long one."""

    def step_s(self, passes: PassCosts) -> float:
        return passes.one_s / 4

    def token_s(self, passes: PassCosts) -> float:
        return passes.one_s / 32


@pytest.mark.matrix
def test_a_draft_model_that_is_never_right_costs_next_to_nothing() -> None:
    with closing(DrivenEngine("llama", load_draft_model=partial(loaded, "qwen3_5"), drafts="auto")) as engine:

        def cost_a_quarter(worker: Worker) -> None:
            assert worker.drafts is not None and worker.draft_model is not None
            worker.drafts.costs, worker.draft_model.costs = FreePasses(), Quarter(relative=0.25)

        engine.ask(cost_a_quarter)
        for seed, num in enumerate((1000, 200)):
            before, drafted = status(engine), num_drafted(engine)
            answer = engine.run(words(1170 + seed, 100), num=num, sampling=SAMPLED)
            num_passes = num - answer.end.outcome.num_accepted
            cost = (num_drafted(engine) - drafted) / 4 + (status(engine).num_prefilled - before.num_prefilled) / 32
            assert num / (num_passes + cost) >= 0.98
        # It was tried, and rested from then on.
        assert 0 < num_drafted(engine) <= 60


def test_a_draft_model_that_lost_is_tried_again_in_time() -> None:
    account = DraftAccount()
    assert account.allows(100)
    account.add(-5)
    assert not account.is_overdrawn and account.allows(3) and not account.allows(4)
    account.add(-5)
    assert account.is_overdrawn
    account.note_answered(790)
    assert account.is_overdrawn
    account.note_answered(20)
    assert not account.is_overdrawn
    # However much it has lost or brought, that is soon made good again.
    account.add(-1000)
    account.note_answered(1210)
    assert not account.is_overdrawn
    account.note_answered(10**6)
    assert account.balance == 0
    account.add(1000)
    account.add(-41)
    assert account.is_overdrawn


def test_a_prefix_that_takes_longer_than_the_answer_is_not_computed() -> None:
    engine = with_draft_model("llama", "llama")

    def make_prefixes_slow(worker: Worker) -> None:
        assert worker.draft_model is not None

        class Slow(FreeModel):
            def token_s(self, passes: PassCosts) -> float:
                # A tenth of what a token of the answer takes.
                return 0.0001

        worker.draft_model.costs = Slow(relative=0.0)

    engine.ask(make_prefixes_slow)
    engine.run(words(1060, 600), num=10)
    assert status(engine).num_prefilled == 0
    engine.run(words(1061, 20), num=40)
    assert status(engine).num_prefilled > 0
    engine.close()


def test_a_model_with_another_vocabulary_is_refused_at_the_start() -> None:
    with pytest.raises(LoadFailed, match="vocabularies differ"):
        DrivenEngine("llama", load_draft_model=partial(loaded, "gpt_oss"), drafts="auto")


def test_drafts_that_are_off_need_no_model() -> None:
    engine = DrivenEngine("llama", drafts="off", draft_model="nowhere at all")
    assert engine.loop.status().drafts is None
    engine.close()
    assert Settings(model="x", draft_model="y").draft_mode == "auto"
    assert Settings(model="x", draft_model="y", drafts="exact").draft_mode == "exact"
    assert Settings(model="x").draft_mode == "off"


@pytest.mark.matrix
def test_after_a_restart_answers_from_disk_are_the_same(tmp_path: Path) -> None:
    plain = DrivenEngine("qwen3_5")
    prompt = words(1070, 300)
    expected = plain.cold(prompt, num=30)
    following = [*prompt, *expected, 5, 6]
    expected_next = plain.cold(following, num=30)
    plain.close()
    first = with_draft_model("qwen3_5", "llama", disk_directory=str(tmp_path))
    assert first.run(prompt, num=30).tokens == expected
    first.close()
    second = with_draft_model("qwen3_5", "llama", disk_directory=str(tmp_path))
    answer = second.run(following, num=30)
    assert answer.tokens == expected_next
    assert answer.end.outcome.num_loaded > 0
    second.close()


@pytest.mark.matrix
def test_beside_another_model_it_comes_and_goes_with_its_own_and_its_prefixes_stay() -> None:
    plain = DrivenEngine("llama")
    prompts = [words(1080, 80), words(1081, 120)]
    expected = [plain.cold(prompt, num=30) for prompt in prompts]
    expected.append(plain.cold([*prompts[1], *expected[1], 5], num=30))
    plain.close()
    thread = EngineThread(SharedMemory(1 << 30))
    model = with_draft_model("llama", "qwen3_5", noise=0.0, thread=thread)
    other = DrivenEngine("mamba2", thread=thread)
    both = loaded("llama").nbytes + loaded("qwen3_5").nbytes
    assert model.ask(lambda worker: dict(worker.memory.shared.weights))[model.loop.name] == both
    assert [model.run(prompt, num=30).tokens for prompt in prompts] == expected[:2]
    assert len(other.run(prompts[0], num=8).tokens) == 8
    reused = status(model).num_reused
    model.loop.dismiss().result(PATIENCE_S)
    assert status(model).weights_nbytes == 0
    assert model.loop.name not in other.ask(lambda worker: dict(worker.memory.shared.weights))
    model.loop.ready().result(PATIENCE_S)
    assert model.run([*prompts[1], *expected[1], 5], num=30).tokens == expected[2]
    assert status(model).num_reused - reused >= len(prompts[1])
    # Its weights go for the other model's requests, and its own answers go on.
    assert model.ask(lambda worker: thread.release_draft_model())
    assert not model.ask(lambda worker: thread.release_draft_model())
    assert model.loop.nbytes == loaded("llama").nbytes
    assert model.run(prompts[0], num=30).tokens == expected[0]
    for engine in (model, other):
        engine.ask(lambda worker: worker.check())
    for engine in (model, other):
        engine.loop.close(now=True, timeout_s=PATIENCE_S)


@pytest.mark.matrix
def test_a_draft_model_whose_files_have_changed_begins_anew() -> None:
    drafting = ["qwen3_5", "llama"]
    thread = EngineThread(SharedMemory(1 << 30))
    engine = DrivenEngine("llama", load_draft_model=lambda: loaded(drafting[0]), drafts="auto", thread=thread)
    engine.ask(draft_always)
    prompt = words(1090, 80)
    expected = engine.run(prompt, num=20).tokens
    engine.loop.dismiss().result(PATIENCE_S)
    drafting.pop(0)
    engine.loop.ready().result(PATIENCE_S)
    engine.ask(draft_always)
    assert engine.run(prompt, num=20).tokens == expected
    assert (status(engine).num_reused, status(engine).weights_nbytes) == (0, loaded("llama").nbytes)
    engine.ask(lambda worker: worker.check())
    engine.close()


def test_without_a_prefix_cache_the_draft_model_keeps_nothing() -> None:
    engine = with_draft_model("llama", "qwen3_5", has_prefix_cache=False)
    prompt = words(1100, 80)
    assert engine.run(prompt, num=20).tokens == engine.run(prompt, num=20).tokens
    assert num_drafted(engine) > 0
    assert (status(engine).num_reused, status(engine).state_nbytes) == (0, 0)
    engine.close()


def test_joining_what_is_stored_is_bounded_behind_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: dict[PrefixCache, int] = {}
    compact_path = PrefixCache.compact_path

    def noting(cache: PrefixCache, tokens: Tokens, **how: Any) -> int:
        bounds[cache] = how.get("max_entries", sys.maxsize)
        return compact_path(cache, tokens, **how)

    monkeypatch.setattr(PrefixCache, "compact_path", noting)
    with closing(with_draft_model("llama", "llama")) as engine:
        engine.run(words(77, 60), num=12)
        assert len(bounds) == 2 and max(bounds.values()) <= 8192
