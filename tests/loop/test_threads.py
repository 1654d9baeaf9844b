"""What only the engine thread may use raises on any other."""

from collections.abc import Callable, Generator

import pytest

from reprise.core.settings import Settings
from reprise.loop.admission import Gate
from reprise.loop.engine_thread import EngineThread
from reprise.loop.model_engine import ModelEngine
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine


@pytest.fixture(scope="module")
def engine() -> Generator[DrivenEngine]:
    engine = DrivenEngine("llama")
    yield engine
    engine.close()


@pytest.mark.parametrize("call", [Worker.step, Worker.check, Worker.clear_cache, Worker.shutdown])
def test_a_worker_that_another_thread_calls_raises(engine: DrivenEngine, call: Callable[[Worker], object]) -> None:
    with pytest.raises(AssertionError):
        call(engine.ask(lambda worker: worker))
    engine.check()


def test_a_models_engine_that_another_thread_calls_raises() -> None:
    model = ModelEngine(
        Settings(model="none"),
        Gate(),
        EngineThread(),
        name="none",
        load=None,
        shares_from=1,
        disk_block=None,
        nbytes=0,
        is_pinned=False,
        keep_alive_s=None,
    )
    for call in (model.state, model.publish, model.write_to_disk, model.shutdown):
        with pytest.raises(AssertionError, match="only the engine thread"):
            call()
