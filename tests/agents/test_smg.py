"""Shepherd Model Gateway before two real servers: chats outlive a replica that is killed, and move with their cache."""

import json
import threading
import time
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path

import httpx
import pytest

from reprise.benchmark.server_process import ServerProcess
from reprise.demo.cluster import hold_all, replica_command, start_gateway
from reprise.disk.read_ahead import MIN_TOKENS
from tests.agents.packages import python_with

pytestmark = pytest.mark.agents

VERSION = "1.13.0"


def test_nobody_loses_more_than_the_answer_under_way() -> None:
    smg = str(python_with("smg", [f"smg=={VERSION}"]).parent / "smg")
    alone, shared, apart = hold_all(smg, num_chats=4, num_turns=24)
    assert shared.num_right == apart.num_right == alone.num_right >= 90 and shared.num_lost <= 4
    # Fewer tokens than that are computed as soon as they are read.
    assert shared.num_computed_then < alone.num_computed_then + 4 * MIN_TOKENS


@pytest.mark.parametrize("is_removed_first", [True, False], ids=["removed", "only stopped"])
def test_a_replica_drains_without_a_failed_request(tmp_path: Path, *, is_removed_first: bool) -> None:
    """As docs/cluster.md has it: taken from the gateway and stopped; and also where it is just stopped."""
    smg = str(python_with("smg", [f"smg=={VERSION}"]).parent / "smg")
    with ExitStack() as stack:
        model = stack.enter_context(as_file(files("reprise.demo") / "model"))
        command = replica_command(model, "--disk-cache", str(tmp_path))
        replicas = [ServerProcess(command) for _ in range(2)]
        for replica in replicas:
            stack.callback(replica.stop)
        gateway = stack.enter_context(start_gateway(smg, replicas))
        clients, is_over = [_Client(gateway.url, seed) for seed in range(4)], threading.Event()
        threads = [threading.Thread(target=client.run, args=(is_over,)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            for client in clients:
                client.wait_for(3)
            leaving = replicas[0]
            if is_removed_first:
                workers = httpx.get(f"{gateway.url}/workers").json()["workers"]
                number = next(each["id"] for each in workers if each["url"] == leaving.url)
                assert httpx.delete(f"{gateway.url}/workers/{number}").status_code in {200, 202, 204}
                until_s = time.monotonic() + 60
                while httpx.get(f"{gateway.url}/workers").json()["total"] > 1:
                    assert time.monotonic() < until_s
                    time.sleep(0.1)
            leaving.stop()
            for client in clients:
                client.wait_for(3)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(120)
        assert [client.failures for client in clients] == [[]] * 4


class _Client:
    """Asks one chat's next turn again and again, streamed, and writes down whatever is not a whole answer."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self._num_answers = 0
        self._answered = threading.Condition()
        self.failures: list[str] = []

    def wait_for(self, num: int) -> None:
        """Until so many more answers have come, or one has failed."""
        with self._answered:
            wanted = self._num_answers + num
            assert self._answered.wait_for(lambda: self._num_answers >= wanted or self.failures, 180)

    def run(self, is_over: threading.Event) -> None:
        messages = [{"role": "system", "content": f"You are assistant {self._seed}."}]
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not is_over.is_set() and len(messages) < 60:
                messages.append({"role": "user", "content": f"What is {len(messages)}?"})
                answer = self._ask(client, messages)
                messages.append({"role": "assistant", "content": answer})
                with self._answered:
                    self._num_answers += 1
                    self._answered.notify_all()

    def _ask(self, client: httpx.Client, messages: list[dict[str, str]]) -> str:
        body = {"model": "model", "messages": messages, "stream": True, "max_tokens": 48}
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                text = reply.read().decode()
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return ""
        if reply.status_code != 200 or "data: [DONE]" not in text or '"error"' in text:
            self.failures.append(f"{reply.status_code} {text[-300:]}")
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk.get("choices", ()))
