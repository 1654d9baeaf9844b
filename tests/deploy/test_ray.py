"""`reprise.cluster.replicas` on Ray Serve, with two replicas of a tiny model on this machine. Needs the extra `ray`."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.lab.bench.server_process import free_port
from tests.models.tiny import tiny_model

pytestmark = [
    pytest.mark.agents,
    # Ray's own, of its import.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray Serve: pip install "mlx-reprise[ray]"'),
]

KEY = "a-key"
REPLICA = "x-reprise-replica"


class RayProcess:
    """The process of `tests/deploy/cluster.py`, and a client of what it serves."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path, client: httpx.Client) -> None:
        self._process, self._log, self.client = process, log, client

    def command(self, *words: str) -> None:
        """Have it do something, and wait until that is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        self.wait()

    def wait(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "cluster: done\n":
                return
        raise AssertionError(self._log.read_text()[-5000:])

    def chat(self, messages: list[dict[str, str]], *, replica: str | None = None) -> tuple[str, dict[str, Any]]:
        """The replica that answers, and its response."""
        headers = {} if replica is None else {REPLICA: replica}
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        response = self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.headers[REPLICA], response.json()

    def wait_until_idle(self, replica: str) -> None:
        """Until it computes nothing, ahead of requests either."""
        until_s = time.monotonic() + 60
        while not self.client.get("/health", headers={REPLICA: replica}).json()["idle"]:
            assert time.monotonic() < until_s

    def replicas(self, num: int) -> list[str]:
        """The replicas, once there are so many."""
        until_s = time.monotonic() + 120
        seen: list[str] = []
        while len(set(seen)) != num or len(seen) < 8:
            assert time.monotonic() < until_s, seen
            seen = [*seen[-7:], self.client.get("/health/ready").headers[REPLICA]]
        return sorted(set(seen))


@contextmanager
def cluster(log: Path, *arguments: str) -> Generator[RayProcess]:
    """With these arguments of `build`."""
    port = free_port()
    command = [sys.executable, "-m", "tests.deploy.cluster", str(port), *arguments]
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {KEY}"}, timeout=60
        ) as client,
    ):
        try:
            found = RayProcess(process, log, client)
            found.wait()
            yield found
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()


def test_two_replicas(tmp_path: Path) -> None:
    """A chat stays where its text is, goes on where its replica is killed, and streams end whole when one stops."""
    arguments = (f"model={tiny_model('qwen3_5')}", f"api-key={KEY}", "grace=30", "max_requests=32")
    with cluster(tmp_path / "log", *arguments, "replicas=2") as served:
        first, second = served.replicas(2)
        assert served.client.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 401
        places = [first, second, second, first, first, second]
        chats = [(replica, long_chat(served, number, replica)) for number, replica in enumerate(places)]
        # Whoever is asked: the second turn goes where the first was.
        for replica, chat in chats:
            at, response = served.chat(chat)
            usage = response["usage"]
            assert at == replica
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.8 * usage["prompt_tokens"]
            say(chat, response)
        # What only one replica knows is found there.
        made = [
            served.client.post("/v1/responses", json={"input": f"I am {n}.", "max_output_tokens": 4}) for n in range(4)
        ]
        for response in made:
            again = {"input": "And you?", "previous_response_id": response.json()["id"], "max_output_tokens": 4}
            followed = served.client.post("/v1/responses", json=again)
            assert followed.status_code == 200 and followed.headers[REPLICA] == response.headers[REPLICA]
        # What is computed while nobody waits stays: that is running.
        for replica in (first, second):
            served.wait_until_idle(replica)
        assert served.client.delete("/v1/cache").json()["cleared"]
        for replica in (first, second):
            held = served.client.get("/health", headers={REPLICA: replica})
            assert held.headers[REPLICA] == replica and held.json()["tokens_held"] == 0
        _, kept = chats[1]
        served.chat(kept, replica=second)

        with ThreadPoolExecutor(2) as pool:
            # A replica is killed in the middle of an answer: that is lost, and says so. Its chat goes on elsewhere.
            events = streamed(served, second, max_tokens=2000)
            next(events)
            served.command("kill", second)
            assert "replica_lost" in json.dumps(list(events)[-1])
            at, response = served.chat(kept)
            assert at == first and response["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
            say(kept, response)

            # Whichever stops finishes its answers.
            (third,) = set(served.replicas(2)) - {first}
            streams = [streamed(served, replica, max_tokens=300) for replica in (first, third)]
            finish(pool, streams, lambda: served.command("deploy", *arguments, "replicas=1"))
            (left,) = served.replicas(1)
            assert served.chat(kept)[0] == left
            # So does the last one, when all is deleted.
            finish(pool, [streamed(served, left, max_tokens=300)], lambda: served.command("delete"))
    said = (tmp_path / "log").read_text()
    # At both stops; a replica that nobody uses is told only by a front that has used it.
    assert len(re.findall(": draining", said)) >= 2


def finish(pool: ThreadPoolExecutor, streams: list[Iterator[Any]], stop: Callable[[], None]) -> None:
    """Stop while these are under way, and see that they end whole."""
    for events in streams:
        next(events)
    rest = [pool.submit(list, events) for events in streams]
    stop()
    for answer in rest:
        *chunks, last, done = answer.result()
        assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
        assert sum(bool(chunk["choices"][0]["delta"]) for chunk in chunks) >= 250


def long_chat(served: RayProcess, number: int, replica: str) -> list[dict[str, str]]:
    """A chat of one turn that this replica has answered."""
    chat = [{"role": "user", "content": f"Chat {number}. " + " ".join(str(number * i * i) for i in range(400))}]
    at, response = served.chat(chat, replica=replica)
    assert at == replica and response["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
    say(chat, response)
    return chat


def say(chat: list[dict[str, str]], response: dict[str, Any]) -> None:
    message = response["choices"][0]["message"]
    chat += [
        {"role": "assistant", "content": message["content"], "reasoning_content": message["reasoning_content"]},
        {"role": "user", "content": "And then?"},
    ]


def streamed(served: RayProcess, replica: str, *, max_tokens: int) -> Iterator[Any]:
    """The events of an answer of this length by this replica."""
    body = {"messages": [{"role": "user", "content": replica}], "max_tokens": max_tokens, "stream": True}
    body["ignore_eos"] = True
    headers = {REPLICA: replica}
    with served.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.headers[REPLICA] == replica
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def test_the_parts_of_ray_that_are_relied_on() -> None:
    """Alpha or private: where one is renamed, Ray would not call ours any more, and nothing else would fail."""
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica  # noqa: PLC0415

    from reprise.cluster.replicas.ray_parts import LookupRouter  # noqa: PLC0415

    for name in ("initialize_state", "choose_replicas", "on_request_routed", "update_replicas"):
        its, ours = (list(signature(getattr(cls, name)).parameters) for cls in (RequestRouter, LookupRouter))
        assert its == [each for each in ours if each != "timeout_s"], name
    assert list(signature(RequestRouter.on_replica_actor_died).parameters) == ["self", "replica_id"]
    assert list(signature(RunningReplica.try_send_request).parameters) == ["self", "pr", "with_rejection"]
    assert {"args", "kwargs", "metadata", "routing_context"} <= {each.name for each in fields(PendingRequest)}


def test_replicas_are_added_by_queue_and_memory() -> None:
    from ray.serve.config import AutoscalingConfig, AutoscalingContext  # noqa: PLC0415

    from reprise.cluster.replicas.ray_parts import ScalingPolicy  # noqa: PLC0415

    def wanted(num_requests: float, memory: dict[str, float]) -> float:
        given = dict.fromkeys(signature(AutoscalingContext).parameters)
        given |= {"total_num_requests": num_requests, "aggregated_metrics": {"memory": memory}}
        given |= {"current_num_replicas": 2, "config": AutoscalingConfig(target_ongoing_requests=8)}
        number, state = ScalingPolicy(target_memory=0.8)(AutoscalingContext(**given))
        assert state == {}
        return number

    assert wanted(24, {"a": 0.1, "b": 0.1}) == 3 and wanted(2, {"a": 0.9, "b": 0.9}) == pytest.approx(2.25)


def test_arguments_are_those_of_the_server(tmp_path: Path) -> None:
    from reprise.cluster.replicas import DeployArguments, build  # noqa: PLC0415

    file = tmp_path / "reprise.toml"
    file.write_text('model = "some/model"\nmax-tokens = 7\ngrace = 5\n')
    environment = {"REPRISE_CONFIG": str(file), "REPRISE_MAX_TOKENS": "8"}
    given = {
        "replicas": "3",
        "max_replicas": "4",
        "disk-bytes": "3GB",
        "kv_bits": "8",
        "settle": "false",
        "api-key": "a b",
    }
    arguments = DeployArguments.model_validate(given)
    settings = arguments.settings(environment)
    assert (arguments.replicas, arguments.max_replicas) == (3, 4)
    assert (settings.model, settings.max_tokens, settings.grace_s, settings.kv_bits) == ("some/model", 8, 5, 8)
    assert settings.disk_bytes.of(1) == 3_000_000_000 and settings.api_keys == ("a", "b") and not settings.settles
    built = build(DeployArguments(model="m", max_replicas=2))  # type: ignore[call-arg]
    assert type(built).__name__ == "Application"

    empty = tmp_path / "empty.toml"
    empty.touch()
    for wrong, sentence in [
        ({"model": "m", "modle": "x"}, "Unknown argument 'modle'"),
        ({"model": "m", "max_tokens": "many"}, "Invalid --max-tokens"),
        ({"model": "m", "tensor_parallel": True}, "cannot run in a replica"),
        ({}, "No server"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            DeployArguments.model_validate(wrong).settings({"REPRISE_CONFIG": str(empty)})
    with pytest.raises(ValueError, match="is less than"):
        DeployArguments(replicas=3, max_replicas=2)
