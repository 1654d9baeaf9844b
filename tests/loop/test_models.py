"""Several models on one engine thread: they answer as single servers do, and their prefixes outlive their weights."""

import itertools
import random
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from reprise.api.settling import Settling
from reprise.core.backend import WeightsState
from reprise.core.errors import LoadFailed, RepriseError
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import as_tokens
from reprise.engine.load import LoadedModel
from reprise.loop import EngineLoop
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import Account, SharedMemory
from reprise.schedule.models import ModelLimits
from tests.loop.driving import PATIENCE_S, Engine, Running
from tests.loop.restarts import words
from tests.matrix import now_and_later
from tests.models.shared import loaded, loaded_anew
from tests.models.tiny import tiny_model

KINDS = ("llama", "qwen3_5", "gemma3_text")


class Served(Engine):
    """A model of several, driven like a single one."""

    def __init__(self, name: str, thread: EngineThread, *, disk_block: int | None = None, **settings: Any) -> None:  # pyright: ignore[reportMissingSuperCall]
        architecture, *_ = name.split(":")
        self.name = name
        self.settings = Settings(model=str(tiny_model(architecture)), is_audit_off=True, **settings)  # pyright: ignore[reportArgumentType]
        self.gate = threading.Event()
        self.gate.set()
        self.fails: list[Exception] = []
        self.loop = EngineLoop(
            self.settings,
            load=self.load,
            thread=thread,
            name=name,
            nbytes=weights(architecture),
            shares_from=256,
            disk_block=disk_block,
        )

    def load(self) -> LoadedModel:
        assert self.gate.wait(PATIENCE_S)
        if self.fails:
            raise self.fails.pop()
        return loaded_anew(Path(self.settings.model).name)

    def ready(self) -> "Served":
        self.loop.ready().result(PATIENCE_S)
        return self

    @property
    def state(self) -> WeightsState:
        return self.loop.status().weights

    def check(self) -> None:
        self.ask(Worker.check)


def weights(architecture: str) -> int:
    return loaded(architecture).nbytes


@contextmanager
def serving(
    *names: str, nbytes: int | None = None, limits: ModelLimits | None = None, **settings: Any
) -> Generator[list[Served]]:
    """Models on one thread, within `nbytes` of memory for weights and layer states."""
    thread = EngineThread(SharedMemory(nbytes), limits=limits)
    served = [Served(name, thread, **settings) for name in names]
    served[0].loop.start()
    try:
        yield served
    finally:
        for each in served:
            each.gate.set()
            each.loop.close(now=True, timeout_s=PATIENCE_S)
        assert not thread.is_alive


def cold(architecture: str, prompts: Sequence[Sequence[int]], *, num: int) -> list[list[int]]:
    engine = Engine(architecture)
    try:
        return [engine.run(prompt, num=num).tokens for prompt in prompts]
    finally:
        engine.close()


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
        engine, chat = Engine(name), list(words(list(chats).index(name), 300))
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


def test_a_queue_is_served_for_a_while_and_the_other_model_s_turn_comes() -> None:
    """Room for one: requests for both come all the time, and all of them are answered, in few swaps."""
    room = max(map(weights, KINDS[:2]))
    with serving(*KINDS[:2], nbytes=room + (64 << 20), limits=ModelLimits(most_nbytes=room, turn_s=0.5)) as models:
        for model in models:
            model.ready()
        running = [model.submit(words(index, 40), num=6) for index in range(8) for model in models]
        alone = {name: cold(name, [words(index, 40) for index in range(8)], num=6) for name in KINDS[:2]}
        for number, each in enumerate(running):
            index, which = divmod(number, 2)
            assert each.wait().tokens == alone[KINDS[which]][index]
        num_steps = {m.name: m.ask(lambda worker: worker.requests.counts["num_finished"]) for m in models}
        assert num_steps == dict.fromkeys(KINDS[:2], 8)


def test_what_one_model_has_stored_makes_room_for_another() -> None:
    nbytes = sum(map(weights, KINDS[:2])) + (2 << 20)
    with serving(*KINDS[:2], nbytes=nbytes, limits=ModelLimits()) as (first, second):
        second.ready()
        for seed in range(12):
            first.submit(words(seed, 600), num=1).wait()
        full = first.ask(lambda worker: worker.memory.shared.state_nbytes)
        assert full > 1 << 20
        for seed in range(12):
            second.submit(words(seed, 600), num=1).wait()
        for model in (first, second):
            model.check()
            held = model.ask(lambda worker: worker.memory.nbytes(Account.KV))
            assert held > 1 << 17, "neither has driven the other out"
            assert model.ask(lambda worker: worker.memory.shared.fits(0))


def test_requests_that_outgrow_the_memory_together_wait_for_each_other() -> None:
    prompt = words(3, 400)
    alone = {name: cold(name, [prompt], num=120)[0] for name in KINDS[:2]}
    engine = Engine("llama", prefill_chunk=64)
    try:
        needed = engine.ask(lambda worker: worker.sequences.estimate(len(prompt)))
    finally:
        engine.close()
    nbytes = sum(map(weights, KINDS[:2])) + needed + needed // 2
    with serving(*KINDS[:2], nbytes=nbytes, limits=ModelLimits(), prefill_chunk=64) as models:
        for model in models:
            model.ready()
        running = [(model.name, model.submit(prompt, num=120)) for model in models]
        assert {name: each.wait().tokens for name, each in running} == alone
        for model in models:
            model.check()


def test_a_long_prompt_of_one_model_leaves_another_s_stream_its_turns() -> None:
    with serving(*KINDS[:2], max_stall_ms=20) as (first, second):
        second.ready()
        second.submit(words(9, 600), num=1).wait()
        streaming = first.submit(words(1, 40), num=150)
        prefilling = second.submit(words(2, 1500), num=1)
        prefilling.wait()
        assert len(prefilling.progress) > 4, "in short chunks"
        assert streaming.wait().tokens


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
    thread = EngineThread(SharedMemory(1 << 28, most_state=1 << 20))
    loop = EngineLoop(settings, thread=thread)
    loop.start()
    try:
        assert loop.status().held.budget_nbytes == 1 << 20
    finally:
        loop.close(now=True, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("seed", now_and_later([1], [2, 3, 4]))
def test_random_traffic_in_room_for_one_is_answered_as_by_single_servers(seed: int) -> None:
    """Chats of three models grow in any order; loads fail, models are unloaded by hand, requests are cancelled."""
    source = random.Random(seed)
    room = max(map(weights, KINDS))
    chats = {(name, index): list(words(seed + index, 60)) for name in KINDS for index in range(2)}
    answers: dict[tuple[str, int], list[tuple[list[int], list[int]]]] = {chat: [] for chat in chats}
    limits = ModelLimits(most_nbytes=room, turn_s=0.2, arrival_s=0.1)
    with serving(*KINDS, nbytes=room + (2 << 20), limits=limits) as models:
        by_name = {model.name: model for model in models}
        for _ in range(12):
            running: list[tuple[tuple[str, int], Running]] = []
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
                if any(chat[0] == model.name and told for chat, told in answers.items()):
                    model.check()
    for name in KINDS:
        engine = Engine(name)
        try:
            for chat, told in answers.items():
                for prompt, tokens in told if chat[0] == name else ():
                    assert engine.cold(prompt, num=len(tokens)) == tokens
        finally:
            engine.close()


def test_after_a_restart_every_model_finds_its_own_on_disk(tmp_path: Path) -> None:
    room = max(map(weights, KINDS[:2]))
    chats = {name: list(words(5, 600)) for name in KINDS[:2]}
    for start in range(2):
        with serving(
            *chats,
            nbytes=room + (64 << 20),
            limits=ModelLimits(most_nbytes=room),
            disk_directory=str(tmp_path / "disk"),
            disk_block=64,
        ) as models:
            for model in models:
                running = model.ready().submit(chats[model.name], num=6).wait()
                if start == 1:
                    assert running.end.outcome.num_loaded > 500, model.name
                    assert running.tokens == cold(model.name, [chats[model.name]], num=6)[0]
                chats[model.name] += running.tokens + list(words(6, 20))
