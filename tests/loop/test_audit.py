"""The live audit finds planted faults of every kind, blames no right answer, and disturbs nothing."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from reprise.cache.node import subtree
from reprise.cache.payload import Payload, SegmentPayload, Source
from reprise.core.backend import AuditTotals
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Sampling
from reprise.core.kinds import KvKind
from reprise.core.tokens import Span
from reprise.engine.running.records import RecordSource
from reprise.engine.states.payloads import PackedSegment, Snapshot
from reprise.engine.states.sequence_batch import SequenceBatch
from reprise.loop.worker import Worker
from reprise.memory import Account
from reprise.quiet import MACHINE
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import Restarts
from tests.loop.test_drafts import make_passes_free
from tests.loop.test_repeats import JOBS, prompt_of, sampled
from tests.matrix import now_and_later
from tests.soak.lengths import times

KINDS = now_and_later(["llama", "gemma3_text", "qwen3_5"], ["gpt_oss", "mamba2", "qwen3"])


def audited(engine: DrivenEngine, num: int) -> AuditTotals:
    """The totals once so many answers were audited; the pauses between the steps are left out."""

    def hurry(worker: Worker) -> int:
        while not worker.requests and worker.audit.totals.num_checked < num and worker.audit.due_in_s is not None:
            worker.audit.hurry()
            worker.step()
        return worker.audit.totals.num_checked

    assert engine.ask(hurry) == num
    engine.check()
    return engine.loop.status().audit


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, is_audit_off=False, audit_rate=1.0)
    yield engine
    engine.close()


def spoil(worker: Worker) -> None:
    """Shift what the cache has of each layer kind by one position, or by a little where there are none."""
    for root in worker.cache.tree.roots.values():
        for node in subtree(root):
            for segments in node.segments.values():
                for segment in segments:
                    assert isinstance(segment.payload, PackedSegment)
                    for stack in segment.payload.stacks:
                        # One plane: with all of them it would be the same entries in another order.
                        stack[:1] = mx.roll(stack[:1], 1, axis=2)
            for checkpoint in node.checkpoints.values():
                if isinstance(checkpoint.snapshot, Snapshot):
                    for arrays in checkpoint.snapshot.states:
                        for array in arrays:
                            if array is not None:
                                array[:] = mx.roll(array, 1, axis=-1)


def test_right_answers_are_not_blamed_and_nothing_is_disturbed(engine: DrivenEngine) -> None:
    prompt = prompt_of(70, 90)
    for job in JOBS.values():
        prompt = [*prompt, *engine.run(prompt, **job).tokens, 5, 6]
    held, clock = engine.loop.status().held, engine.ask(lambda worker: worker.cache.tree.clock)
    # The waiting ones are bounded, and audits run between the requests as well.
    totals = audited(engine, len(JOBS))
    assert (totals.num_checked, totals.num_different) == (len(JOBS), 0)
    assert totals.worst < 0.01
    assert engine.loop.status().held == replace(held, live_nbytes=0)
    assert engine.ask(lambda worker: worker.cache.tree.clock) == clock
    engine.check()


def test_what_waits_for_its_audit_goes_on_waiting_on_a_machine_that_is_left_alone(
    engine: DrivenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(worker: Worker) -> tuple[int, bool]:
        worker.audit.hurry()
        worker.step()
        return worker.audit.totals.num_checked, worker.audit.due_in_s is not None

    # Answers that begin on such a machine are not sampled at all; this one began before.
    ACTIONS[Failpoint.DECODE] = lambda lives: monkeypatch.setattr(MACHINE, "reason", "hot")
    engine.run(prompt_of(70, 40))
    assert engine.ask(step) == (0, True)
    monkeypatch.setattr(MACHINE, "reason", None)
    audited(engine, 1)


def test_a_wrong_state_is_found_and_its_path_dropped(engine: DrivenEngine, caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompt_of(71, 90)
    engine.run(prompt)
    audited(engine, 1)
    engine.ask(spoil)
    with caplog.at_level(logging.ERROR, "reprise.loop"):
        longer = engine.run([*prompt, 7, 8, 9], num=12)
        totals = audited(engine, 2)
    assert longer.end.outcome.num_reused > 0
    assert totals.num_different == 1 and totals.worst > 0.01
    (said,) = [record.getMessage() for record in caplog.records if "audit of" in record.getMessage()]
    report = json.loads(said[said.index("{") :])
    assert report["job"] == longer.job.id and report["reused"] == longer.end.outcome.num_reused
    assert report["sampling"]["seed"] is not None and "prompt" not in report
    assert engine.loop.status().held.num_tokens == 0
    engine.check()
    again = engine.run([*prompt, 7, 8, 9], num=12)
    assert again.tokens == engine.cold([*prompt, 7, 8, 9], num=12)


@dataclass(frozen=True, slots=True)
class Spoilt:
    """What was read, shifted by one position."""

    source: Source

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self.source.segment_nbytes(kind, length)

    def snapshot_nbytes(self) -> int:
        return self.source.snapshot_nbytes()

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        segment = self.source.segment(kind, span)
        assert isinstance(segment, PackedSegment)
        for stack in segment.stacks:
            stack[:1] = mx.roll(stack[:1], 1, axis=2)
        return segment

    def snapshot(self) -> Payload:
        return self.source.snapshot()


def test_what_the_disk_gives_back_wrong_is_found_and_removed(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"is_audit_off": False, "audit_rate": 1.0}
    prompt = prompt_of(72, 300)
    start("llama").run(prompt)
    engine = start("llama", **options)
    source = RecordSource.source
    monkeypatch.setattr(RecordSource, "source", lambda read, position: Spoilt(source(read, position)))
    assert engine.run([*prompt, 5, 6]).end.outcome.num_loaded > 0
    assert audited(engine, 1).num_different == 1
    monkeypatch.undo()
    # The audit waits for no file; another clear is after it.
    engine.loop.clear("another").result(PATIENCE_S)
    assert not list(Path(start.directory).rglob("*.kv"))


@pytest.mark.parametrize("architecture", KINDS)
def test_rows_that_are_mixed_up_in_a_batch_are_found(architecture: str) -> None:
    mixed: list[SequenceBatch] = []

    def mix_up(rows: SequenceBatch, _: mx.array) -> None:
        if not mixed and rows.num_rows == 3 and min(rows.lengths) > 65:
            owners = list(rows.owners)
            rows.keep_rows([1, 2, 0])
            rows.owners = owners
            mixed.append(rows)

    engine = DrivenEngine(architecture, is_audit_off=False, audit_rate=1.0)
    try:
        # Not before: a model whose batches differ when it is loaded runs its sequences alone.
        ACTIONS[Failpoint.FORWARD] = mix_up
        running = engine.submit_all([prompt_of(80 + i, 64) for i in range(3)], num=12)
        assert all(each.wait().end.error is None for each in running)
        assert mixed and audited(engine, 3).num_different == 3
    finally:
        engine.close()


def test_an_audit_gives_way_and_gives_its_memory_back() -> None:
    engine = DrivenEngine("llama", is_audit_off=False, audit_rate=1.0, prefill_chunk=16)
    try:
        prompt = prompt_of(73, 200)
        answer = engine.run(prompt)

        def begin(worker: Worker) -> tuple[int, int, int]:
            worker.audit.give_up()
            before = worker.memory.nbytes(Account.SEQUENCES)
            worker.audit.hurry()
            while worker.memory.nbytes(Account.SEQUENCES) == before:
                worker.step()
                worker.audit.hurry()
            during = worker.memory.nbytes(Account.SEQUENCES)
            worker.check()
            assert worker.audit.give_up() and not worker.audit.give_up()
            worker.check()
            return before, during, worker.memory.nbytes(Account.SEQUENCES)

        before, during, after = engine.ask(begin)
        assert before == after < during
        assert engine.run(prompt).tokens == answer.tokens
        assert audited(engine, 2).num_different == 0
    finally:
        engine.close()


@pytest.mark.parametrize("settings", [{"is_audit_off": True}, {"audit_rate": 0.0, "is_audit_off": False}])
def test_without_it_nothing_is_computed_again(settings: dict[str, Any]) -> None:
    engine = DrivenEngine("llama", **settings)
    try:
        engine.run(prompt_of(74))
        assert engine.ask(lambda worker: worker.audit.due_in_s) is None
    finally:
        engine.close()


def test_a_near_tie_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens that nothing but rounding tells apart: which one comes is nobody's fault."""
    engine = DrivenEngine("llama", is_audit_off=False, audit_rate=1.0)
    prompt = prompt_of(75)
    try:
        (first,) = sampled(engine.run(prompt, sampling=Sampling(temperature=0, logprobs=2), num=1))
        (one, likely), (other, less) = first.top
        almost = Sampling(temperature=0, logit_bias={other: likely - less - 0.001})
        assert audited(engine, 1).num_near_ties == 0
        assert engine.cold(prompt, sampling=almost, num=1) == [one]
        # Before rounding begins: it would tell the audit of this answer another one.
        audited(engine, 2)
        forward = SequenceBatch.forward

        def rounded(rows: SequenceBatch, *given: Any) -> mx.array:
            logits = forward(rows, *given)
            return mx.put_along_axis(logits, mx.full((1, 1, 1), other), logits[..., other : other + 1] + 0.002, axis=-1)

        with monkeypatch.context() as patched:
            patched.setattr(SequenceBatch, "forward", rounded)
            assert engine.cold(prompt, sampling=almost, num=1) == [other]
        totals = audited(engine, 3)
        assert (totals.num_near_ties, totals.num_different) == (1, 0)
        assert 0 < totals.worst < 0.01
    finally:
        engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("drafts", ["off", "always"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5", "gpt_oss", "mamba2", "qwen3"])
def test_it_never_blames_a_right_answer(architecture: str, drafts: str) -> None:
    """Chats that grow, are asked again and are cut, with new ones beside them, with drafts and without."""
    engine = DrivenEngine(architecture, is_audit_off=False, audit_rate=1.0, drafts=drafts)
    try:
        if drafts == "always":
            engine.ask(make_passes_free)
        num = reused = accepted = 0
        chats = [prompt_of(900 + i, 40 + 60 * i) for i in range(3)]
        for seed in range(times(6)):
            temperature = (0.0, 0.7, 1.5)[seed % 3]
            sampling = Sampling(seed=seed, temperature=temperature, top_p=0.95, min_p=0.02, logprobs=1)
            prompts = [*chats, chats[seed % 3], prompt_of(1000 + seed, 40 + 37 * seed % 300)]
            answers = [each.wait() for each in engine.submit_all(prompts, num=24, sampling=sampling)]
            answers.append(engine.run(prompts[0], num=24, sampling=sampling))
            num += len(answers)
            reused += sum(answer.end.outcome.num_reused for answer in answers)
            accepted += sum(answer.end.outcome.num_accepted for answer in answers)
            totals = audited(engine, num)
            assert totals.num_different == 0, totals
            pairs = zip(chats, answers, strict=False)
            grown = [[*prompt, *answer.tokens, 5, *prompt[-20:]] for prompt, answer in pairs]
            chats = [chat[: len(chat) // 2] if len(chat) > 400 else chat for chat in grown]
        assert reused > 0 and (accepted > 0) == (drafts == "always")
        near_ties = f"{totals.num_near_ties} near-ties, worst {totals.worst:.1e}"
        print(f"{architecture}, drafts {drafts}: {num} audited, {near_ties}")
        print(f"{reused} tokens reused, {accepted} accepted from drafts")
    finally:
        engine.close()
