"""Health is progress: what the server says of itself, and its log, when the engine hangs."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from reprise.api.native.server_routes import load_of
from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.core.backend import Counts, Held, Status
from reprise.core.settings import Settings
from reprise.loop import EngineClient
from reprise.loop.heartbeat import Heartbeat, watchdog
from tests.api.server_process import server_process
from tests.api.server_thread import ServerThread
from tests.models.tiny import tiny_model

AFTER_S = 0.2


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def never() -> None:
    raise AssertionError("it lives")


def test_a_hang_is_told_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(model=str(tiny_model("llama")), stall_after_s=AFTER_S, api_keys=("key",), drafts="off")
    engine = EngineClient(settings)
    loaded = engine.start()
    service = ChatService(served=served_model(loaded, settings), backend=engine, settings=settings)
    server = ServerThread(service, settings)
    may_go_on = threading.Event()

    def hang_here() -> None:
        may_go_on.wait(30)

    try:
        with (
            caplog.at_level(logging.WARNING, "reprise"),
            watchdog(engine, after_s=AFTER_S, on_death=never, every_s=0.01),
            httpx.Client(base_url=server.url) as client,
        ):
            # Where somebody with something to do counts as hung, this engine is idle.
            hung = Heartbeat()
            hung.wake()
            until(lambda: hung.stalled_s > 2 * AFTER_S)
            assert (client.get("/health").json()["status"], client.get("/health").json()["stalled_s"]) == ("ok", 0)
            assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200
            assert not caplog.records
            loads = client.get("/v1/loads?include=core", headers={"authorization": "Bearer key"}).json()
            assert loads["dp_rank_count"] == 1 and loads["loads"] == [load_of(engine.status())]
            engine.call(lambda worker: hang_here())
            until(lambda: client.get("/health/live").status_code == 503)
            assert client.get("/health/ready").json() == {"status": "stalled"}
            assert client.get("/health").status_code == 503
            until(lambda: bool(caplog.records))
            assert "no progress" in caplog.text
            assert "in hang_here" in caplog.text
            may_go_on.set()
            until(lambda: client.get("/health/live").status_code == 200)
            until(lambda: "making progress again" in caplog.text)
            service.begin_close()
            assert client.get("/health/live").status_code == 200
            assert client.get("/health/ready").json() == {"status": "closing"}
    finally:
        may_go_on.set()
        server.stop()
        engine.close(now=True, timeout_s=30)


def test_the_load_is_what_runs_and_what_waits() -> None:
    held = Held(live_nbytes=50, budget_nbytes=200)
    load = load_of(Status(num_waiting=2, num_prefilling=1, num_decoding=3, held=held))
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (4, 2, 6)
    assert load["token_usage"] == 0.25 and load_of(Status())["token_usage"] == 0


def test_steps_without_tokens_are_no_progress() -> None:
    now_s = [10.0]
    heartbeat = Heartbeat(clock=lambda: now_s[0])
    heartbeat.wake()
    waiting = Status(is_idle=False, num_waiting=1, counts=Counts(num_requests=1))
    heartbeat.note(waiting)
    for _ in range(5):
        now_s[0] += 1
        heartbeat.wake()
        heartbeat.note(waiting)
    assert heartbeat.stalled_s == 5
    heartbeat.note(Status(is_idle=False, counts=Counts(num_requests=1, num_generated=1)))
    assert heartbeat.stalled_s == 0
    now_s[0] += 3
    assert heartbeat.stalled_s == 3
    heartbeat.rest()
    assert heartbeat.stalled_s == 0


_MORTAL = """
import ctypes, signal, sys, threading
from reprise.cli.main import app

def kill(number, frame):
    (thread,) = [each for each in threading.enumerate() if each.name == "reprise-engine"]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

signal.signal(signal.SIGUSR1, kill)
app()
"""


@pytest.mark.matrix
def test_a_server_whose_engine_thread_dies_ends_to_be_started_again(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "temperature": 0, "stream": True}
    log = tmp_path / "log"
    with (
        server_process(log, program=("-c", _MORTAL)) as (process, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        until(lambda: client.get("/health/ready").status_code == 200)
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGUSR1)
            errors = [line for line in lines if '"error"' in line]
        assert len(errors) == 1 and "started again" in errors[0], log.read_text()
        assert client.get("/health").json()["status"] == "dead"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert process.wait(30) == 75, log.read_text()
