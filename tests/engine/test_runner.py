"""Sequences that run together: they group and regroup as they are asked for, and nobody notices."""

import random

import pytest

from reprise.core.job import Sampling, Thinking
from reprise.core.tokens import as_tokens
from tests.engine.sequences import RunnerWithCache, a_job
from tests.loop.test_reuse import words

ARCHITECTURES = ["llama", "gemma3_text", "qwen3_5"]


@pytest.fixture(params=ARCHITECTURES)
def bench(request: pytest.FixtureRequest) -> RunnerWithCache:
    return RunnerWithCache(request.param)


def test_random_company_changes_nothing(bench: RunnerWithCache) -> None:
    """Each pass is for some of the sequences, in any order: strangers are split off, members join."""
    draw = random.Random(3)
    prompts = [words(800 + i, length) for i, length in enumerate((12, 60, 33, 90))]
    expected = [bench.tokens(prompt, num=15) for prompt in prompts]
    lives = [bench.begin(a_job(prompt, num=15)) for prompt in prompts]
    said: list[list[int]] = [[] for _ in lives]
    while any(len(tokens) < 15 for tokens in said):
        left = [i for i, tokens in enumerate(said) if len(tokens) < 15]
        group = draw.sample(left, draw.randint(1, len(left)))
        for live, token in bench.step([lives[i] for i in group]).items():
            assert isinstance(token, int)
            said[lives.index(live)].append(token)
    assert said == expected


def test_one_that_ends_leaves_the_others_in_place(bench: RunnerWithCache) -> None:
    prompts = [words(810 + i, 20 + 9 * i) for i in range(3)]
    expected = [bench.tokens(prompt, num=12) for prompt in prompts]
    lives = [bench.begin(a_job(prompt, num=12)) for prompt in prompts]
    said = {live: [] for live in lives}
    for round_ in range(12):
        if round_ == 4:
            bench.runner.stop(lives.pop(1))
        for live, token in bench.step(lives).items():
            said[live].append(token)
    whole = [said[live] for live in said]
    assert [whole[0], whole[2]] == [expected[0], expected[2]]
    assert whole[1] == expected[1][:4]


def test_what_is_stored_in_the_middle_of_a_batch_is_right(bench: RunnerWithCache) -> None:
    """A commit between two passes, while the next one may have been begun, stores what was accepted."""
    prompts = [words(820 + i, 25 + 10 * i) for i in range(3)]
    jobs = [a_job(prompt, num=20) for prompt in prompts]
    lives = [bench.begin(job) for job in jobs]
    for _ in range(7):
        bench.step(lives)
    for live, job in zip(lives, jobs, strict=True):
        bench.keep(live, job)
        bench.cache.check()
    after = bench.step(lives)
    for live, job in zip(lives, jobs, strict=True):
        tokens = [*job.prompt.tokens.tolist(), *live.ready.tokens[:7]]
        match = bench.cache.match(as_tokens(tokens))
        assert bench.cache.resume_at(match, limit=len(tokens) - 1) == len(tokens) - 1
        assert bench.tokens(tokens, num=1) == [after[live]]


def test_one_broken_row_breaks_alone(bench: RunnerWithCache) -> None:
    prompts = [words(830 + i, 20 + 7 * i) for i in range(3)]
    expected = [bench.tokens(prompt, num=8) for prompt in prompts]

    def refuse(token: int) -> bool:
        raise RuntimeError("the watch is broken")

    lives = [bench.begin(a_job(prompt, num=8)) for prompt in prompts]
    broken = bench.begin(a_job(words(840, 31), num=8, watch=refuse))
    result = bench.step([lives[0], broken, *lives[1:]])
    assert isinstance(result[broken], RuntimeError)
    bench.runner.stop(broken)
    said = [[result[live]] for live in lives]
    for _ in range(7):
        result = bench.step(lives)
        for tokens, live in zip(said, lives, strict=True):
            tokens.append(result[live])
    assert said == expected


def test_a_grammar_that_raises_breaks_alone(bench: RunnerWithCache) -> None:
    class Broken:
        def allowed(self) -> None:
            raise ValueError("no such rule")

        def accept(self, token: int) -> None:
            raise AssertionError("it was never asked")

    prompt = words(850, 30)
    expected = bench.tokens(prompt, num=4)
    ours, broken = bench.begin(a_job(prompt, num=4)), bench.begin(a_job(words(851, 22), constraint=Broken))
    said: list[int | Exception] = []
    for _ in range(4):
        result = bench.step([ours, broken])
        assert isinstance(result[broken], ValueError)
        said.append(result[ours])
    assert said == expected


def test_sequences_of_all_sorts_together(bench: RunnerWithCache) -> None:
    jobs = [
        lambda: a_job(words(860, 20), num=10),
        lambda: a_job(words(861, 45), num=10, sampling=Sampling(seed=1)),
        lambda: a_job(words(862, 33), num=10, sampling=Sampling(temperature=0, logprobs=2)),
        lambda: a_job(words(863, 27), num=10, sampling=Sampling(seed=2, repetition_penalty=1.2)),
        lambda: a_job(words(864, 38), num=10, thinking=Thinking(start=(5,), end=(6, 7), budget=4, is_open=True)),
    ]
    expected = [[event.token for event in bench.events(make())] for make in jobs]
    lives = [bench.begin(make()) for make in jobs]
    passes = [bench.step(lives) for _ in range(10)]
    assert [[result[live] for result in passes] for live in lives] == expected


def test_prefill_in_slices_together(bench: RunnerWithCache) -> None:
    """Fresh sequences share slices of equal length and then decode together."""
    prompts = [words(870 + i, 40) for i in range(3)]
    expected = [bench.tokens(prompt, num=6) for prompt in prompts]
    other = RunnerWithCache(bench.runner.loaded.architecture)
    lives = [other.runner.begin() for _ in prompts]
    for live in lives:
        live.rows.reserve(50)
    for start, stop in ((0, 25), (25, 39)):
        order = lives if start == 0 else lives[::-1]
        chunks = [as_tokens(prompts[lives.index(live)][start:stop]) for live in order]
        other.runner.prefill(order, chunks)
    for live, prompt in zip(lives, prompts, strict=True):
        other.runner.begin_decode(live, a_job(prompt, num=6))
    passes = [other.step(lives) for _ in range(6)]
    assert [[result[live] for result in passes] for live in lives] == expected


def test_the_bytes_of_live_sequences_are_counted_once(bench: RunnerWithCache) -> None:
    runner = bench.runner
    assert runner.live_nbytes == 0
    lives = [bench.begin(a_job(words(880 + i, 50))) for i in range(3)]
    apart = runner.live_nbytes
    assert apart == sum(live.rows.nbytes for live in lives)
    bench.step(lives)
    assert len({id(live.rows) for live in lives}) == 1
    assert runner.live_nbytes == lives[0].rows.nbytes
    for live in lives:
        runner.stop(live)
    assert runner.live_nbytes == 0


def test_the_footprint_is_what_sequences_take(bench: RunnerWithCache) -> None:
    footprint, blueprint = bench.runner.footprint, bench.runner.loaded.blueprint
    job = a_job(words(890, 100))
    bench.events(job)
    stored = bench.cache.stats
    # Windows are stored as far as they are needed at the end of the prompt and after the answer.
    assert stored.snapshot_nbytes in (0, footprint.snapshot)
    if blueprint.layout.resumes_anywhere or blueprint.layout.has_snapshots:
        assert stored.kv_nbytes + stored.snapshot_nbytes == footprint.at(stored.num_tokens)
    assert footprint.full == sum(n for kind, n in footprint.by_kind.items() if not hasattr(kind, "size"))


def test_a_sequence_that_was_dropped_is_forgotten(bench: RunnerWithCache) -> None:
    live = bench.begin(a_job(words(900, 30)))
    bench.runner.drop(live)
    bench.runner.drop(live)
    assert bench.runner.live_nbytes == 0
