"""Shepherd Model Gateway before real servers: chats outlive a replica that is killed, and move with their cache."""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path
from random import Random

import httpx
import pytest

from bench.cluster_demo import hold_all, replica_command, start_gateway
from bench.fact_chats import random_chat
from reprise.lab.bench.server_process import ServerProcess
from reprise.lab.demo.facts import FactExchange
from reprise.loop.read_ahead import MIN_TOKENS
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
        model = stack.enter_context(as_file(files("reprise.lab.demo") / "model"))
        command = replica_command(model, "--disk-cache", str(tmp_path))
        replicas = [ServerProcess(command) for _ in range(2)]
        for replica in replicas:
            stack.callback(replica.stop)
        gateway = stack.enter_context(start_gateway(smg, replicas))
        clients, is_over = [_ChatClient(gateway.url, seed) for seed in range(4)], threading.Event()
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


NUM_CHATS, NUM_TURNS = 9, 16
MOST_S = 120.0
"""What takes longer is stuck."""


def test_one_of_three_dies_under_load_and_no_answer_is_wrong_or_stuck(tmp_path: Path) -> None:
    smg = str(python_with("smg", [f"smg=={VERSION}"]).parent / "smg")
    with ExitStack() as stack:
        model = stack.enter_context(as_file(files("reprise.lab.demo") / "model"))
        with ServerProcess(replica_command(model)) as alone:
            expected = _chats(alone.url)
            _hold(expected)
        assert all(chat.failures == [] and len(chat.answers) == NUM_TURNS for chat in expected)
        replicas = [ServerProcess(replica_command(model, "--disk-cache", str(tmp_path))) for _ in range(3)]
        for replica in replicas:
            stack.callback(replica.stop)
        chats = _chats(stack.enter_context(start_gateway(smg, replicas)).url, num_tries=30)

        def kill_one() -> None:
            _wait_until(lambda: sum(len(chat.answers) for chat in chats) >= NUM_CHATS * NUM_TURNS // 3)
            _wait_until(lambda: _num_running(replicas[-1]) > 0)
            replicas[-1].kill()

        _hold(chats, meanwhile=kill_one)
        assert len({answer for chat in expected for answer in chat.answers}) > NUM_CHATS * 4, "a mix-up would show"
        assert [chat.answers for chat in chats] == [chat.answers for chat in expected]
        assert sum(len(chat.failures) for chat in chats) <= NUM_CHATS, "no more than the answers under way"
        assert max(chat.longest_s for chat in chats) < MOST_S


def _chats(url: str, *, num_tries: int = 1) -> list["_ChatClient"]:
    return [_ChatClient(url, seed, most_turns=NUM_TURNS, num_tries=num_tries) for seed in range(NUM_CHATS)]


def _hold(chats: Sequence["_ChatClient"], *, meanwhile: Callable[[], None] = lambda: None) -> None:
    """All chats to their ends, none of which waits for another."""
    threads = [threading.Thread(target=chat.run, args=(threading.Event(),), daemon=True) for chat in chats]
    for thread in threads:
        thread.start()
    meanwhile()
    until_s = time.monotonic() + 4 * MOST_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a chat is stuck"


def _wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 4 * MOST_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def _num_running(replica: ServerProcess) -> int:
    return sum(each["num_running_reqs"] for each in httpx.get(f"{replica.url}/v1/loads").json()["loads"])


class _ChatClient:
    """Holds one chat of `NUM_TURNS` turns after the other, streamed, and notes whatever is not a whole answer."""

    def __init__(self, url: str, seed: int, *, most_turns: float = math.inf, num_tries: int = 1) -> None:
        """`num_tries`: how often a question is asked, each half a second after the last."""
        self._url, self._seed = url, seed
        self._most_turns, self._num_tries = most_turns, num_tries
        self._answered = threading.Condition()
        self.answers: list[str] = []
        self.failures: list[str] = []
        self.longest_s = 0.0

    def wait_for(self, num: int) -> None:
        """Until so many more answers have come, or one has failed."""
        with self._answered:
            wanted = len(self.answers) + num
            assert self._answered.wait_for(lambda: len(self.answers) >= wanted or self.failures, 180)

    def run(self, is_over: threading.Event) -> None:
        messages, asked = list[dict[str, str]](), list[FactExchange]()
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not is_over.is_set() and len(self.answers) < self._most_turns:
                if not asked:
                    seed = self._seed + 1000 * len(self.answers)
                    messages = [{"role": "system", "content": f"You are assistant {seed}."}]
                    asked = random_chat(Random(seed), NUM_TURNS, has_tool=False)
                messages.append({"role": "user", "content": asked.pop(0).user})
                answer = self._ask_until_answered(client, messages)
                messages.append({"role": "assistant", "content": answer})
                with self._answered:
                    self.answers.append(answer)
                    self._answered.notify_all()

    def _ask_until_answered(self, client: httpx.Client, messages: list[dict[str, str]]) -> str:
        for number in range(self._num_tries):
            time.sleep(0.5 if number > 0 else 0.0)
            began_s = time.monotonic()
            answer = self._ask(client, messages)
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            if answer is not None:
                return answer
        return ""

    def _ask(self, client: httpx.Client, messages: list[dict[str, str]]) -> str | None:
        """None: no whole answer."""
        body = {"model": "model", "messages": messages, "stream": True, "max_tokens": 48, "temperature": 0}
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                text = reply.read().decode()
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return None
        if reply.status_code != 200 or "data: [DONE]" not in text or '"error"' in text:
            self.failures.append(f"{reply.status_code} {text[-300:]}")
            return None
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk.get("choices", ()))
