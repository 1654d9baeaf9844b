"""Drafts are on by default where a trial, run while nobody waits, shows that their passes give the same tokens."""

import time
from collections.abc import Sequence
from contextlib import closing

import mlx.core as mx
import pytest

from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.settings import Settings
from reprise.core.tokens import Tokens
from reprise.engine.running.runner import LiveSequence, Runner
from reprise.loop.worker import Worker
from reprise.memory import Account
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.test_drafts import SAMPLED, FreePasses
from tests.loop.test_reuse import words
from tests.models.headed import headed_model


def sizes_after_trial(engine: DrivenEngine) -> tuple[int, ...] | None:
    """The sizes of the engine's drafts once the trial is over; None: it drafts nothing."""
    deadline_s = time.monotonic() + PATIENCE_S

    def state(worker: Worker) -> tuple[bool, tuple[int, ...] | None]:
        return worker.is_tried, None if worker.drafts is None else worker.drafts.sizes

    while time.monotonic() < deadline_s:
        is_tried, sizes = engine.ask(state)
        if is_tried:
            return sizes
        time.sleep(0.01)
    raise AssertionError("the trial did not end")


@pytest.fixture
def all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where every pass costs the same."""

    def free(sizes: Sequence[int]) -> FreePasses:
        return FreePasses()

    monkeypatch.setattr("reprise.loop.draft_trial.PassCosts", free)


def test_drafts_are_the_default() -> None:
    assert Settings(model="any").drafts == "auto"


@pytest.mark.usefixtures("all_pay")
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_after_the_trial_answers_are_drafted_and_stay_the_same(architecture: str) -> None:
    prompt = words(3100, 90)
    with (
        closing(DrivenEngine(architecture, drafts="auto")) as drafting,
        closing(DrivenEngine(architecture, drafts="off")) as plain,
    ):
        expected = plain.run(prompt, num=32).tokens
        assert drafting.run(prompt, num=32).tokens == expected
        sizes = sizes_after_trial(drafting)
        assert sizes is not None and sizes[-1] == 32
        again = drafting.run(prompt, num=32)
        assert again.tokens == expected and again.end.outcome.num_accepted > 10
        # What the trial computed is neither counted nor kept.
        assert drafting.ask(lambda worker: worker.runner.num_sequences) == plain.ask(lambda w: w.runner.num_sequences)
        drafting.ask(lambda worker: worker.check())


@pytest.mark.usefixtures("all_pay")
def test_a_trial_gives_way_to_a_request() -> None:
    seen: list[int] = []

    def slow(chunk: Tokens, is_undone: bool) -> None:
        if is_undone:
            seen.append(len(chunk))
            time.sleep(0.02)

    ACTIONS[Failpoint.LOGITS] = slow
    with closing(DrivenEngine("llama", drafts="auto")) as engine:
        deadline_s = time.monotonic() + PATIENCE_S
        while not seen and time.monotonic() < deadline_s:
            time.sleep(0.005)
        answer = engine.run(words(3110, 40), num=4)
        assert len(answer.tokens) == 4 and len(seen) < 33
        assert sizes_after_trial(engine) is not None


def test_a_trial_waits_until_it_has_been_quiet_for_a_while() -> None:
    tried_at_s: list[float] = []

    def noted(*what: object) -> None:
        tried_at_s.append(time.monotonic())
        time.sleep(0.01)

    ACTIONS[Failpoint.LOGITS] = noted
    with closing(DrivenEngine("llama", drafts="auto")) as engine:
        engine.run(words(3140, 40), num=4)
        ended_s = time.monotonic()
        sizes_after_trial(engine)
    assert min(at_s for at_s in tried_at_s if at_s > ended_s) - ended_s > 0.8


def test_what_a_trial_gives_up_is_not_charged_any_longer() -> None:
    is_tried: list[bool] = []

    def slow(*what: object) -> None:
        is_tried.append(True)
        time.sleep(0.02)

    ACTIONS[Failpoint.LOGITS] = slow

    def unload(worker: Worker) -> int:
        """The sequences that were there before."""
        num = worker.runner.num_sequences
        worker.unload()
        worker.memory.check({Account.SEQUENCES: worker.runner.live_nbytes})
        return num

    with closing(DrivenEngine("llama", drafts="auto")) as engine:
        engine.run(words(3130, 40), num=4)
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_tried and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert engine.ask(unload) > 0
        assert engine.ask(lambda worker: worker.wakes_in_s) != 0.0


@pytest.mark.usefixtures("all_pay")
def test_where_passes_differ_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Runner.logits

    def other(self: Runner, live: LiveSequence, chunk: Tokens) -> mx.array:
        return true(self, live, chunk) + 0.1 * len(chunk)

    monkeypatch.setattr(Runner, "logits", other)
    with closing(DrivenEngine("llama", drafts="auto")) as engine:
        assert sizes_after_trial(engine) is None
        assert engine.loop.status().drafts is None
        assert len(engine.run(words(3120, 40), num=4).tokens) == 4


@pytest.mark.matrix
@pytest.mark.usefixtures("all_pay")
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_exact_drafts_use_only_passes_that_equal_single_steps(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a draft has any length, and where tokens are fed again behind a rejected one."""
    true, fed = Runner.logits, set[int]()

    def logits(self: Runner, live: LiveSequence, chunk: Tokens) -> mx.array:
        return true(self, live, chunk) + (1e-6 if len(chunk) == 5 else 0)

    monkeypatch.setattr(Runner, "logits", logits)

    class Noted(FreePasses):
        def note(self, num_tokens: int, seconds: float) -> None:
            fed.add(num_tokens)

    def note_passes(worker: Worker) -> None:
        assert worker.drafts is not None
        worker.drafts.costs = Noted()

    with closing(DrivenEngine(architecture, drafts="exact")) as engine:
        sizes = sizes_after_trial(engine)
        assert sizes is not None and sizes[-1] == 4
        engine.ask(note_passes)
        prompt = words(797, 60)
        for _ in range(2):
            engine.run(prompt, sampling=SAMPLED, num=24)
            engine.run([*prompt, *words(798, 3)], sampling=SAMPLED, num=24)
    assert max(fed) in (2, 3, 4), fed


def test_a_head_that_could_draft_nothing_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(several: object, single: object, *, tolerance: float) -> bool:
        return False

    monkeypatch.setattr("reprise.engine.running.pass_trial.are_same", never)
    with (
        closing(DrivenEngine(headed_model("qwen3_5"), drafts="exact")) as engine,
        closing(DrivenEngine(headed_model("qwen3_5"), drafts="off")) as plain,
    ):
        head = engine.model.head
        assert head is not None and not head.is_there and "passes over two tokens" in head.reason
        assert engine.model.nbytes == plain.model.nbytes
        assert engine.model.fingerprint == plain.model.fingerprint
    assert "--drafts always" in caplog.text


@pytest.mark.usefixtures("all_pay")
def test_what_the_trial_found_is_in_the_status_while_it_is_open_and_afterwards() -> None:
    with closing(DrivenEngine("llama", drafts="auto")) as engine:
        engine.run(words(3150, 40), num=4)
        assert engine.loop.status().drafting == "tried once nothing has run for a second"
        assert sizes_after_trial(engine) is not None
        drafting = engine.loop.status().drafting
        assert drafting is not None and drafting.startswith("verified in passes of up to 32 tokens"), drafting
    with closing(DrivenEngine("llama", drafts="off")) as engine:
        assert engine.loop.status().drafting is None


def test_of_drafts_that_are_not_made_the_status_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.engine.running.pass_trial.are_same", lambda *what, **more: False)
    with closing(DrivenEngine("llama", drafts="auto")) as engine:
        assert sizes_after_trial(engine) is None
        drafting = engine.loop.status().drafting
        assert drafting is not None and drafting.startswith("not made: no passes"), drafting


@pytest.mark.usefixtures("all_pay")
def test_a_head_drafts_where_the_trial_allows_it() -> None:
    with closing(DrivenEngine(headed_model("qwen3_5"), drafts="auto")) as engine:
        assert engine.model.head is not None and engine.model.head.is_there
        assert sizes_after_trial(engine) is not None
        assert engine.ask(lambda worker: worker.head) is not None
