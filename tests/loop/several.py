"""Several models on one engine thread, each driven like a single one."""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reprise.core.backend import WeightsState
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.engine.models.load import LoadedModel
from reprise.loop import EngineClient
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import BLOCK
from tests.models.shared import loaded, loaded_anew
from tests.models.tiny import tiny_model


class OneOfSeveral(DrivenEngine):
    """A model of several, driven like a single one."""

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        name: str,
        thread: EngineThread,
        *,
        disk_block: int | None = None,
        is_pinned: bool = False,
        **settings: Any,
    ) -> None:
        architecture, *_ = name.split(":")
        self.name = name
        self.settings = Settings(model=str(tiny_model(architecture)), is_audit_off=True, **settings)  # pyright: ignore[reportArgumentType]
        self.gate = threading.Event()
        self.gate.set()
        self.fails: list[Exception] = []
        self.loop = EngineClient(
            self.settings,
            load=self.load,
            thread=thread,
            name=name,
            nbytes=weights(architecture),
            shares_from=256,
            disk_block=disk_block,
            is_pinned=is_pinned,
        )

    def load(self) -> LoadedModel:
        assert self.gate.wait(PATIENCE_S)
        if self.fails:
            raise self.fails.pop()
        return loaded_anew(Path(self.settings.model).name)

    def ready(self) -> "OneOfSeveral":
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
) -> Generator[list[OneOfSeveral]]:
    """Models on one thread, within `nbytes` of memory for weights and layer states."""
    thread = EngineThread(SharedMemory(nbytes), limits=limits)
    served = [OneOfSeveral(name, thread, **settings) for name in names]
    served[0].loop.start()
    try:
        yield served
    finally:
        for each in served:
            each.gate.set()
            each.loop.close(now=True, timeout_s=PATIENCE_S)
        assert not thread.is_alive


def cold(architecture: str, prompts: Sequence[Sequence[int]], *, num: int) -> list[list[int]]:
    engine = DrivenEngine(architecture)
    try:
        return [engine.run(prompt, num=num).tokens for prompt in prompts]
    finally:
        engine.close()


@contextmanager
def serving_one_at_a_time(*names: str, turn_s: float = 10.0, **settings: Any) -> Generator[list[OneOfSeveral]]:
    """The same in room for the weights of any one of them, and for all that they keep."""
    room = max(weights(name.split(":")[0]) for name in names)
    limits = ModelLimits(most_nbytes=room, turn_s=turn_s)
    with serving(*names, nbytes=room + (64 << 20), limits=limits, **settings) as models:
        yield models


def on_disk(directory: Path) -> dict[str, Any]:
    """Settings of models that keep what they compute there."""
    return {"disk_directory": str(directory), "disk_bytes": Bytes(1 << 28), "disk_block": BLOCK}
