"""Several models on one engine thread: they answer as single servers do, and their prefixes outlive their weights."""

import itertools
import json
import random
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import mlx.core as mx
import pytest

from reprise.api.service.settling import Settling
from reprise.core.backend import WeightsState
from reprise.core.errors import LoadFailed, RepriseError, ShuttingDown
from reprise.core.events import Event, FinishReason, Progress, Sampled
from reprise.core.job import Purpose
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import as_tokens
from reprise.engine.memory import freeze_heap
from reprise.engine.models.load import LoadedModel
from reprise.loop import EngineClient, model_engine, read_ahead
from reprise.loop.engine_thread import EngineThread
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits
from tests.loop.driving import PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.restarts import words
from tests.loop.several import OneOfSeveral, cold, on_disk, serving, serving_one_at_a_time, weights
from tests.models.tiny import tiny_model

KINDS = ("llama", "qwen3_5", "gemma3_text")


@pytest.mark.matrix
def test_models_side_by_side_answer_as_alone() -> None:
    prompts = [words(10 + index, 60 + 40 * index) for index in range(3)]
    alone = {name: cold(name, prompts, num=12) for name in KINDS}
    with serving(*KINDS) as models:
        for model in models:
            model.ready()
        for _ in range(2):
            running = [(model, model.submit(prompt, num=12)) for prompt in prompts for model in models]
            answers = {name: [r.wait().tokens for m, r in running if m.name == name] for name in KINDS}
            assert answers == alone
        for model in models:
            model.check()
            assert model.submit(prompts[2], num=1).wait().computed <= 2, "each has its own tree"


def test_a_prefix_outlives_the_weights_it_was_computed_with() -> None:
    """The agent's model and its helper's take turns in room for one: each turn computes what is new."""
    room = max(map(weights, KINDS[:2]))
    limits = ModelLimits(most_nbytes=room)
    chats = {name: list(words(seed, 300)) for seed, name in enumerate(KINDS[:2])}
    alone: dict[str, list[list[int]]] = {name: [] for name in chats}
    warm: dict[str, list[list[int]]] = {name: [] for name in chats}
    new = 20
    with serving(*KINDS[:2], nbytes=room + (64 << 20), limits=limits) as models:
        for turn, model in itertools.product(range(3), models):
            other = next(each for each in models if each is not model)
            running = model.ready().submit(chats[model.name], num=8).wait()
            assert (model.state, other.state) == (WeightsState.READY, WeightsState.UNLOADED)
            if turn > 0:
                # The last token of an answer was not fed.
                assert running.computed == new + 1
            warm[model.name].append(running.tokens)
            chats[model.name] += running.tokens + list(words(50 + turn, new))
            for each in models[: 1 if turn == 0 and model is models[0] else 2]:
                each.check()
    for name in chats:
        engine, chat = DrivenEngine(name), list(words(list(chats).index(name), 300))
        try:
            for turn, answer in enumerate(warm[name]):
                alone[name].append(engine.cold(chat, num=8))
                chat += answer + list(words(50 + turn, new))
        finally:
            engine.close()
    assert warm == alone


def test_nothing_is_settled_for_a_model_that_was_unloaded() -> None:
    with serving("llama", "qwen3_5") as (_, model):
        settling = Settling(model.ready().loop, max_tokens=4096)
        model.loop.dismiss().result(PATIENCE_S)
        settling.begin(Prompt(tokens=as_tokens(words(10, 300))), request_id="over")
        assert len(settling) == 0
        # Nor is one queued again that is under way when the weights go.
        model.ready()
        settling.begin(Prompt(tokens=as_tokens(words(10, 3000))), request_id="under-way")
        model.loop.dismiss().result(PATIENCE_S)
        deadline_s = time.monotonic() + PATIENCE_S
        while len(settling) > 0:
            assert time.monotonic() < deadline_s
            model.ask(lambda _: None)


def test_weights_are_given_back_to_the_system() -> None:
    with serving("llama", "qwen3_5") as (_, second):
        second.ready().submit(words(1, 50), num=2).wait()
        both = mx.get_active_memory()
        second.loop.dismiss().result(PATIENCE_S)
        assert second.state is WeightsState.UNLOADED
        freed = both - mx.get_active_memory()
        assert freed > 0.9 * weights("qwen3_5")
        assert second.ready().submit(words(1, 50), num=1).wait().computed <= 2, "what is stored stays"


def test_weights_that_go_have_no_frozen_object_searched() -> None:
    """A search of the whole heap stops every stream for a tenth of a second or more."""

    class Knot:
        def __init__(self) -> None:
            self.self = self

    knot = Knot()
    gone = weakref.ref(knot)
    with serving("llama", "qwen3_5") as (_, second):
        freeze_heap()
        del knot
        second.ready()
        second.loop.dismiss().result(PATIENCE_S)
        assert gone() is not None


def test_weights_that_come_back_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def reason(loaded: LoadedModel) -> None:
        tried.append(loaded.name)

    monkeypatch.setattr(model_engine, "reason_to_run_alone", reason)
    with serving("llama", "qwen3_5") as (_, second):
        for name in ("qwen3_5", "qwen3_5", "gemma3_text"):
            second.settings = Settings(model=str(tiny_model(name)))
            second.ready()
            second.loop.dismiss().result(PATIENCE_S)
    assert tried == ["llama", "qwen3_5", "gemma3_text"]


def test_others_go_on_while_a_model_is_loaded() -> None:
    with serving("llama", "qwen3_5") as (first, second):
        second.gate.clear()
        wanted = second.loop.ready()
        assert first.submit(words(1, 80), num=40).wait().tokens
        assert second.state is WeightsState.LOADING and not wanted.done()
        second.gate.set()
        wanted.result(PATIENCE_S)


def test_a_load_that_fails_leaves_everything_as_it_was() -> None:
    with serving("llama", "qwen3_5", nbytes=64 << 20) as (first, second):
        before = first.run(words(1, 80), num=4).tokens
        second.fails = [ValueError("half of the file is there"), LoadFailed("No such file.")]
        with pytest.raises(RepriseError, match="No such file"):
            second.ready()
        with pytest.raises(RepriseError, match="half of the file"):
            second.ready()
        assert second.state is WeightsState.UNLOADED
        assert first.ask(lambda worker: worker.memory.shared.weights) == {"llama": weights("llama")}
        assert first.run(words(1, 80), num=4).tokens == before
        second.ready().run(words(1, 80), num=4)


def test_what_was_stored_of_other_weights_is_not_found() -> None:
    with serving("llama", "qwen3") as (_, second):
        second.ready().run(words(1, 80), num=4)
        second.loop.dismiss().result(PATIENCE_S)
        # The files are another model's by now.
        second.settings = Settings(model=str(tiny_model("llama")))
        again = second.ready().run(words(1, 80), num=4)
        assert again.computed == 80 and again.tokens == cold("llama", [words(1, 80)], num=4)[0]


def test_a_model_that_can_never_fit_is_refused_with_the_numbers() -> None:
    limits = ModelLimits(most_nbytes=weights("llama"))
    with serving("llama", "gemma3_text", limits=limits) as (first, second):
        second.loop.nbytes = 10**12
        with pytest.raises(LoadFailed, match=r"gemma3_text does not fit: its weights are 1 TB, and models may take"):
            second.ready()
        assert first.run(words(1, 20), num=2).tokens


def test_the_disk_of_weights_that_do_not_fit_is_let_go(tmp_path: Path) -> None:
    small, *_, large = sorted(KINDS, key=weights)
    limits = ModelLimits(most_nbytes=weights(large) - 1)
    with serving(small, large, limits=limits, **on_disk(tmp_path)) as (_, second):
        # How large it is, is known once it was read.
        second.loop.nbytes = 0
        with pytest.raises(LoadFailed, match="does not fit"):
            second.ready()
        until_s = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.glob("*/servers/*"))) > 1 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert len(list(tmp_path.glob("*/servers/*"))) == 1, "that of the first"


@pytest.mark.matrix
def test_a_queue_is_served_for_a_while_and_the_other_model_s_turn_comes() -> None:
    """Room for one: requests for both come all the time, and all of them are answered, in few swaps."""
    with serving_one_at_a_time(*KINDS[:2], turn_s=0.05) as models:
        for model in models:
            model.ready()
        running = [model.submit(words(index, 40), num=6) for index in range(8) for model in models]
        alone = {name: cold(name, [words(index, 40) for index in range(8)], num=6) for name in KINDS[:2]}
        for number, each in enumerate(running):
            index, which = divmod(number, 2)
            assert each.wait().tokens == alone[KINDS[which]][index]
        num_steps = {m.name: m.ask(lambda worker: worker.requests.counts["num_finished"]) for m in models}
        assert num_steps == dict.fromkeys(KINDS[:2], 8)
        assert sum(model.loop.status().num_loads for model in models) <= 6, "not one for each request"


def test_a_model_that_has_answered_those_it_was_loaded_for_gives_way_at_once() -> None:
    room = max(map(weights, KINDS[:2]))
    limits = ModelLimits(most_nbytes=room, turn_s=2 * PATIENCE_S, arrival_s=2 * PATIENCE_S)
    with serving(*KINDS[:2], nbytes=room + (64 << 20), limits=limits) as models:
        for turn, model in itertools.product(range(3), models):
            # Weights that were never there are asked for first.
            (model.ready() if turn == 0 else model).submit(words(turn, 20), num=2).wait()
        assert [model.loop.status().num_loads for model in models] == [3, 3]


def test_a_model_that_somebody_has_asked_to_be_loaded_is_kept_until_they_come() -> None:
    """Though another request, for which it was loaded as well, is answered before."""
    room = max(map(weights, KINDS[:2]))
    limits = ModelLimits(most_nbytes=room, turn_s=2 * PATIENCE_S, arrival_s=2 * PATIENCE_S)
    with serving(*KINDS[:2], nbytes=room + (64 << 20), limits=limits) as (other, model):
        for each in (other, model, other):
            each.ready().submit(words(1, 20), num=2).wait()
        model.gate.clear()
        first, ready = model.submit(words(2, 20), num=2), model.loop.ready()
        deadline_s = time.monotonic() + PATIENCE_S
        while model.state is not WeightsState.LOADING:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        waiting = other.submit(words(3, 20), num=2)
        model.gate.set()
        ready.result(PATIENCE_S)
        first.wait()
        for _ in range(20):
            model.ask(lambda _: None)
        model.submit(words(4, 20), num=2).wait()
        assert model.loop.status().num_loads == 2
        waiting.wait()


def test_weights_that_go_for_others_while_their_model_settles_are_not_run() -> None:
    """Those of the other fit beside them, but not beside what the settle has computed as well."""
    nbytes = weights("llama") + weights("qwen3_5")
    limits = ModelLimits(most_nbytes=nbytes)
    with serving("llama", "qwen3_5", nbytes=nbytes + 320_000, limits=limits, prefill_chunk=32) as (model, other):
        model.submit(words(1, 40), num=3).wait()
        num_steps, ready = itertools.count(), list[Future[LoadedModel]]()

        def hear(event: Event) -> None:
            if isinstance(event, Progress) and next(num_steps) == 19:
                ready.append(other.loop.ready())

        settle = model.submit(words(2, 900), purpose=Purpose.SETTLE, on_event=hear).wait()
        assert settle.end.reason is FinishReason.CANCELLED
        ready[0].result(PATIENCE_S)
        assert model.submit(words(3, 40), num=3).wait().tokens == cold("llama", [words(3, 40)], num=3)[0]


def test_a_model_is_not_unloaded_for_what_its_own_step_needs() -> None:
    thread = EngineThread(SharedMemory(weights("llama") + weights("qwen3_5") + 320_000))
    model = OneOfSeveral("llama", thread, prefill_chunk=64)
    other = OneOfSeveral("qwen3_5", thread, is_pinned=True, prefill_chunk=64)
    model.loop.start()
    try:
        other.ready()
        model.submit(words(1, 40), num=3).wait()
        settle = model.submit(words(2, 1000), purpose=Purpose.SETTLE).wait()
        assert settle.end.error is None and model.state is WeightsState.READY
        assert model.num_leases() == 0
        assert model.ask(lambda worker: worker.runner.num_sequences == len(worker.sequences.idle))
        model.check()
    finally:
        for each in (model, other):
            each.loop.close(now=True, timeout_s=PATIENCE_S)


def test_weights_that_came_just_now_do_not_go_first() -> None:
    nbytes = sum(map(weights, KINDS)) + 300_000
    with serving(*KINDS, nbytes=nbytes, prefill_chunk=64) as (model, older, newest):
        older.ready().submit(words(1, 10), num=1).wait()
        newest.ready()
        model.submit(words(2, 900), num=20).wait()
        assert (older.state, newest.state) == (WeightsState.UNLOADED, WeightsState.READY)


@pytest.mark.matrix
def test_what_one_model_has_stored_makes_room_for_another() -> None:
    """Whose goes is told by `tests/cache/test_accounts.py`: here it depends on how fast each computes."""
    nbytes = sum(map(weights, KINDS[:2])) + (1 << 20)
    with serving(*KINDS[:2], nbytes=nbytes, limits=ModelLimits()) as models:
        first, second = (model.ready() for model in models)
        for seed in range(5):
            first.submit(words(seed, 300), num=1).wait()
        shared = first.ask(lambda worker: worker.memory.shared)
        num_evicted = sum(model.loop.status().counts.num_evictions for model in models)
        assert shared.state_nbytes > 1 << 19
        for seed in range(5):
            second.submit(words(seed, 300), num=1).wait()
        for model in models:
            model.check()
        assert sum(model.loop.status().counts.num_evictions for model in models) > num_evicted
        assert shared.fits(0) and shared.state_nbytes > 1 << 19, "and what fits stays"


@pytest.mark.matrix
def test_requests_that_outgrow_the_memory_together_wait_for_each_other() -> None:
    prompt = words(3, 240)
    alone = {name: cold(name, [prompt], num=50)[0] for name in KINDS[:2]}
    engine = DrivenEngine("llama", prefill_chunk=64)
    try:
        needed = engine.ask(lambda worker: worker.sequences.estimate(len(prompt)))
    finally:
        engine.close()
    nbytes = sum(map(weights, KINDS[:2])) + needed + needed // 2
    with serving(*KINDS[:2], nbytes=nbytes, limits=ModelLimits(), prefill_chunk=64) as models:
        for model in models:
            model.ready()
        running = [(model.name, model.submit(prompt, num=50)) for model in models]
        assert {name: each.wait().tokens for name, each in running} == alone
        for model in models:
            model.check()


@pytest.mark.matrix
def test_a_long_prompt_of_one_model_leaves_another_s_stream_its_turns() -> None:
    """By counts: between two tokens of the stream there is one chunk of the prompt at most."""
    heard: list[str] = []
    with serving(*KINDS[:2], prefill_chunk=64) as (first, second):
        second.ready()

        def hear(event: Event) -> None:
            # All models are on one thread, so this is the order of their steps.
            if isinstance(event, Sampled | Progress):
                heard.append(type(event).__name__)

        streaming = first.submit(words(1, 40), num=60, on_event=hear)
        streaming.wait_for(Sampled)
        prefilling = second.submit(words(2, 1000), num=1, on_event=hear)
        prefilling.wait()
        assert len(streaming.wait().tokens) == 60
    chunks = [len(list(same)) for name, same in itertools.groupby(heard) if name == "Progress"]
    tokens = len(heard) - 1 - heard[::-1].index("Sampled")
    assert len(chunks) > 4, "they took turns"
    num_between = [n for n, at in zip(chunks, itertools.accumulate(chunks), strict=True) if at < tokens]
    assert max(num_between) <= 2, "a chunk is heard of when it begins and when it has ended"


def test_nothing_is_unloaded_under_an_answer() -> None:
    with serving("llama", "qwen3_5") as (first, _):
        running = first.submit(words(1, 40), num=100)
        first.loop.dismiss()
        late = first.submit(words(2, 40), num=5)
        assert len(running.wait().tokens) == 100
        assert len(late.wait().tokens) == 5, "loaded again for it"


def test_a_closed_thread_leaves_nobody_waiting() -> None:
    with serving("llama", "qwen3_5") as (_, second):
        second.gate.clear()
        wanted = second.loop.ready()
        second.loop.close(now=True, timeout_s=0)
        second.gate.set()
        assert isinstance(wanted.exception(PATIENCE_S), RepriseError)


def test_two_models_of_one_budget_have_settings_of_their_own() -> None:
    settings = Settings(model=str(tiny_model("llama")), cache_bytes=Bytes(1 << 20))
    thread = EngineThread(SharedMemory(1 << 28, max_state_nbytes=1 << 20))
    loop = EngineClient(settings, thread=thread)
    loop.start()
    try:
        assert loop.status().held.budget_nbytes == 1 << 20
    finally:
        loop.close(now=True, timeout_s=PATIENCE_S)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 4))
def test_random_traffic_in_room_for_one_is_answered_as_by_single_servers(seed: int) -> None:
    """Chats of three models grow in any order; loads fail, models are unloaded by hand, requests are cancelled."""
    source = random.Random(seed)
    room = max(map(weights, KINDS))
    chats = {(name, index): list(words(seed + index, 60)) for name in KINDS for index in range(2)}
    answers: dict[tuple[str, int], list[tuple[list[int], list[int]]]] = {chat: [] for chat in chats}
    limits = ModelLimits(most_nbytes=room, turn_s=0.05, arrival_s=0.1)
    with serving(*KINDS, nbytes=room + (1 << 20), limits=limits) as models:
        by_name = {model.name: model for model in models}
        for _ in range(14):
            running: list[tuple[tuple[str, int], SubmittedJob]] = []
            for chat in source.sample(sorted(chats), 3):
                model = by_name[chat[0]]
                if source.random() < 0.2 and model.state is WeightsState.UNLOADED:
                    model.fails = [LoadFailed("A file is cut off.")]
                try:
                    model.ready()
                except LoadFailed:
                    continue
                running.append((chat, model.submit(chats[chat], num=source.randint(1, 12))))
                if source.random() < 0.2:
                    # Under load: it goes when what runs has ended.
                    model.loop.dismiss()
                if source.random() < 0.2:
                    model.loop.cancel(running.pop()[1].job.id)
            for chat, each in running:
                if each.wait().end.error is not None:
                    # Those that waited when a load failed have been told.
                    assert "cut off" in str(each.end.error)
                    continue
                answers[chat].append((list(chats[chat]), each.tokens))
                chats[chat] += each.tokens + list(words(source.randrange(1000), 10))
            shared = models[0].ask(lambda worker: worker.memory.shared)
            assert shared.weights_nbytes <= room and shared.fits(0)
            for model in models:
                if model.loop.status().num_loads > 0:
                    model.check()
        assert sum(model.loop.status().num_loads for model in models) > 4, "they were swapped"
    for name in KINDS:
        # Each answer was one of a warm server; a single one has no more than this model.
        engine = DrivenEngine(name)
        try:
            for chat, told in answers.items():
                for prompt, tokens in told if chat[0] == name else ():
                    assert engine.run(prompt, num=len(tokens)).tokens == tokens
        finally:
            engine.close()


@pytest.mark.matrix
def test_a_killed_server_s_models_find_their_own_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So few tokens, too.
    monkeypatch.setattr(read_ahead, "MIN_TOKENS", 1)
    names, script = KINDS[:2], Path(__file__).with_name("killed.py")
    command = [sys.executable, str(script), str(tmp_path), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            before = [json.loads(process.stdout.readline()) for _ in names]
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    with serving_one_at_a_time(*names, **on_disk(tmp_path)) as models:
        for seed, (model, answer) in enumerate(zip(models, before, strict=True)):
            prompt = words(seed, 200)
            longer = [*prompt, *answer, *words(9, 20)]
            further = model.ready().submit(longer, num=6).wait()
            # The last token of an answer was not fed.
            assert (further.end.outcome.num_loaded, further.computed) == (205, 21), "from disk"
            assert [answer, further.tokens] == cold(model.name, [prompt, longer], num=6)
            model.check()


def test_a_server_that_stops_fails_what_waits_for_weights_and_nothing_else() -> None:
    with serving("llama", "qwen3_5") as (here, other):
        other.gate.clear()
        waiting, running = other.loop.ready(), here.submit(words(95, 20), num=50)
        for model in (here, other):
            model.loop.refuse_loads()
        assert isinstance(waiting.exception(PATIENCE_S), ShuttingDown)
        assert isinstance(other.loop.ready().exception(PATIENCE_S), ShuttingDown)
        assert running.wait().end.error is None and here.loop.ready().result(PATIENCE_S) is not None
