"""A replica: the application of `reprise serve` without a socket, and what the cluster asks it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from reprise.cluster.replicas.forwarded import CutOff, ForwardedRequest
from reprise.cluster.replicas.replica import ReplicaServer
from reprise.core.backend import Held, Status
from reprise.core.errors import EngineFailed
from reprise.core.installation import mend_line
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.servers import HELLO, MODEL, make_service
from tests.models.tiny import tiny_model

Answer = tuple[int, dict[str, str], str]
"""Status, headers, body."""


def chat(*texts: str, path: str = "/v1/chat/completions", **fields: Any) -> ForwardedRequest:
    said = {"messages": [{"role": "user" if n % 2 == 0 else "assistant", "content": t} for n, t in enumerate(texts)]}
    content = json.dumps({**said, **fields}).encode()
    return ForwardedRequest(
        method="POST", path=path, query=b"", headers=((b"content-type", b"application/json"),), body=content
    )


@asynccontextmanager
async def fake_replica(**settings: Any) -> AsyncGenerator[tuple[ReplicaServer, FakeBackend]]:
    """A replica of a fake engine."""
    backend = FakeBackend(script=HELLO)
    chosen = Settings(model=MODEL, **settings)
    replica = ReplicaServer(chosen, name="r1")
    await replica.serve(make_service(backend, settings=chosen))
    try:
        yield replica, backend
    finally:
        backend.may_prefill.set()
        backend.may_decode.set()
        await replica.stop()
        backend.stop()


async def answer(replica: ReplicaServer, request: ForwardedRequest) -> Answer:
    messages = [message async for batch in replica.respond(request) for message in batch]
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(message.get("body", b"") for message in messages[1:]).decode()


async def leaves_while_answering(replica: ReplicaServer, backend: FakeBackend) -> asyncio.Future[Answer]:
    """Its answer, which ends when the backend may decode or the replica cuts it off."""
    backend.may_decode.clear()
    asking = asyncio.ensure_future(answer(replica, chat("Hi.", stream=True)))
    while not backend.jobs:
        await asyncio.sleep(0.01)
    replica.leave()
    return asking


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_it_answers_in_its_name() -> None:
    async def test() -> None:
        async with fake_replica() as (replica, _):
            status, headers, text = await answer(replica, chat("Hi."))
            assert status == 200 and headers["x-reprise-replica"] == "r1"
            assert json.loads(text)["choices"][0]["message"]["content"] == "Hello there."
            _, _, stream = await answer(replica, chat("Hi.", stream=True))
            assert stream.endswith("data: [DONE]\n\n")
            assert replica.load() == {"memory": 0.0}

    run(test)


def test_a_real_engine_offers_what_it_has_and_ends() -> None:
    async def test() -> None:
        replica = ReplicaServer(Settings(model=str(tiny_model("llama")), log_level="error"), name="r1")
        await replica.start()
        try:
            cold = await replica.lookup(chat("Tell me of the tide. " * 40))
            assert cold is not None and cold.num_computed > 100 and cold.num_requests == 0 < cold.prefill_s
            await answer(replica, chat("Tell me of the tide. " * 40, max_tokens=4))
            warm = await replica.lookup(chat("Tell me of the tide. " * 40))
            assert warm is not None and warm.num_computed < 10
            replica.check()
        finally:
            await replica.stop()

    run(test)


def test_of_a_bad_request_nothing_is_offered() -> None:
    async def test() -> None:
        async with fake_replica() as (replica, _):
            assert await replica.lookup(chat("Hi.", temperature="much")) is None
            assert await replica.lookup(chat("Hi.", model="other")) is None
            assert await replica.lookup(chat("Hi.")) is not None

    run(test)


def test_whoever_leaves_ends_its_answers_within_the_grace() -> None:
    async def test() -> None:
        async with fake_replica(grace_s=0.3) as (replica, backend):
            asking = await leaves_while_answering(replica, backend)
            assert backend.is_hurried and not asking.done()
            with pytest.raises(CutOff):
                await asking
            assert backend.cancelled

    run(test)


def test_whoever_gets_a_request_after_all_stays() -> None:
    async def test() -> None:
        async with fake_replica(grace_s=0.3) as (replica, backend):
            asking = await leaves_while_answering(replica, backend)
            await answer(replica, ForwardedRequest(method="GET", path="/health", query=b"", headers=(), body=b""))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(asking), 0.5)
            backend.may_decode.set()
            assert (await asking)[2].endswith("data: [DONE]\n\n")

    run(test)


@pytest.mark.parametrize("ill", [Status(has_died=True), Status(stalled_s=1e9)], ids=["dead", "stalled"])
def test_what_only_a_restart_helps_is_told(monkeypatch: pytest.MonkeyPatch, ill: Status) -> None:
    async def test() -> None:
        async with fake_replica() as (replica, backend):
            replica.check()
            with monkeypatch.context() as patch:
                patch.setattr(backend, "status", lambda: ill)
                with pytest.raises(EngineFailed):
                    replica.check()

    run(test)


def test_memory_that_running_requests_hold_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with fake_replica() as (replica, backend):
            with monkeypatch.context() as patch:
                held = Status(held=Held(live_nbytes=30, budget_nbytes=40))
                patch.setattr(backend, "status", lambda: held)
                assert replica.load() == {"memory": 0.75}

    run(test)


_WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
import reprise.cluster.replicas
for name in ("build", "app"):
    try:
        getattr(reprise.cluster.replicas, name)
    except ImportError as error:
        print(error)
assert not hasattr(reprise.cluster.replicas, "other")
"""


def test_without_ray_it_says_what_to_install() -> None:
    # In a process of its own: in this one another test may have imported Ray.
    ran = subprocess.run([sys.executable, "-c", _WITHOUT_RAY], capture_output=True, text=True, check=True)
    assert (
        ran.stdout.splitlines()
        == [f"reprise.cluster.replicas needs Ray Serve. Install it with: {mend_line('ray')}"] * 2
    )
