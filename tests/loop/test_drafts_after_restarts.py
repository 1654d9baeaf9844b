"""What was said before a restart is drafted again after it, in its own namespace alone, until it is cleared."""

import pytest

from reprise.core.backend import DraftSource
from reprise.core.sizes import Bytes
from reprise.core.tokens import as_tokens
from reprise.drafts.drafter import DecodingRow, propose
from reprise.loop.worker import Worker
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import Restarts, words
from tests.loop.test_drafts import SAMPLED, make_passes_free

PROMPT = words(1, 300)


def started(start: Restarts, model: str = "llama", **options: object) -> DrivenEngine:
    """An engine that drafts whatever it can."""
    engine = start(model, drafts="always", **options)
    engine.ask(make_passes_free)
    return engine


def num_repeated(engine: DrivenEngine, prompt: list[int], *, namespace: str = "") -> int:
    """How many tokens of an answer were drafted from what was said before, and right."""
    outcome = engine.run(prompt, num=48, sampling=SAMPLED, namespace=namespace).end.outcome
    drafted = outcome.drafted.get(str(DraftSource.HISTORY))
    return drafted.num_accepted if drafted is not None else 0


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_an_answer_from_before_a_restart_is_drafted_when_it_is_asked_for_again(start: Restarts, model: str) -> None:
    first = started(start, model).run(PROMPT, num=48, sampling=SAMPLED)
    second = started(start, model)
    again = second.run(PROMPT, num=48, sampling=SAMPLED)
    assert again.tokens == first.tokens
    assert again.end.outcome.drafted[str(DraftSource.HISTORY)].num_accepted >= 30
    second.check()


def test_another_chat_drafts_from_what_was_said_before_a_restart(start: Restarts) -> None:
    said = started(start).run(PROMPT, num=48, sampling=SAMPLED).tokens
    second = started(start)

    def proposed(worker: Worker) -> list[int]:
        assert worker.drafts is not None
        prompt = as_tokens([*words(2, 200), *said[:8]])
        request = worker.drafts.start(prompt, namespace="")
        while request.num_read < len(prompt):
            request.read_prompt(len(prompt))
        (draft,) = propose([DecodingRow(drafts=request, num_fed=1, most=31)])
        return draft.tokens.tolist() if draft is not None else []

    assert second.ask(proposed) == said[8:39]


def test_what_was_said_before_a_restart_is_of_its_own_namespace_alone(start: Restarts) -> None:
    started(start).run(PROMPT, num=48, sampling=SAMPLED, namespace="mine")
    second = started(start)
    assert num_repeated(second, PROMPT, namespace="theirs") == 0
    assert num_repeated(second, PROMPT, namespace="mine") >= 30


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_cleared_after_a_restart_is_not_drafted(start: Restarts, is_known: bool) -> None:
    started(start).run(PROMPT, num=48, sampling=SAMPLED)
    second = started(start)
    if is_known:
        second.run([1, 2, 3], num=2)
    second.loop.clear("").result(PATIENCE_S)
    assert num_repeated(second, PROMPT) == 0


def test_what_was_said_while_drafts_were_off_is_drafted_later(start: Restarts) -> None:
    start("llama").run(PROMPT, num=48, sampling=SAMPLED)
    assert num_repeated(started(start), PROMPT) >= 30


def test_without_a_disk_nothing_from_before_is_drafted(start: Restarts) -> None:
    started(start).run(PROMPT, num=48, sampling=SAMPLED)
    assert num_repeated(started(start, disk_bytes=Bytes(0), disk_directory=None), PROMPT) == 0
