"""Honest and hostile clients against one server process: nobody's answer changes, and nothing stops or grows."""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.api.server_process import server_process
from tests.soak.clients import ClientReport
from tests.soak.hostile import Intruder
from tests.soak.lengths import times
from tests.workloads.talk import QUESTIONS

_TIMEOUT_S = 300.0
_TIE = 1e-3
_NUM_CHATS = 16
_NUM_TURNS = 3
_NUM_EACH = 2
"""The chats of each honest client; the hostile ones go on until the last of these has ended."""
_MOST_GROWTH = 400 * 10**6

Turn = list[tuple[str, float]]
"""The tokens of an answer, each with how much likelier it is than the next likeliest."""

_POLL = """
import http.client, sys, time
worst = num = 0
while True:
    time.sleep(0.1)
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=300)
    connection.request("GET", "/health")
    if connection.getresponse().read():
        num += 1
    connection.close()
    worst = max(worst, time.monotonic() - began_s)
    print(worst, num, flush=True)
"""


@contextmanager
def polling(port: int) -> Generator[list[float]]:
    """Another process asks for `/health` all the time, and each is answered; gives the most seconds one took so far."""
    worst: list[float] = []
    command = [sys.executable, "-c", _POLL, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            assert process.stdout is not None
            worst.extend(float(line.split()[0]) for line in process.stdout)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield worst
            num = len(worst)
            while len(worst) == num and process.poll() is None:
                time.sleep(0.05)
            assert process.poll() is None, "one was not answered"
        finally:
            process.kill()
            thread.join(60)


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, however often the server says that it is full."""
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        assert time.monotonic() < until_s, "nobody was served"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status not in (429, 503):
            assert response.status == 200, text[:300]
            return json.loads(text)
        time.sleep(0.2)


def ask(port: int, messages: list[dict[str, str]]) -> Turn:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    (choice,) = post(port, body)["choices"]
    items = choice["logprobs"]["content"]
    return [(each["token"], each["top_logprobs"][0]["logprob"] - each["top_logprobs"][1]["logprob"]) for each in items]


def chat(number: int, turn: int) -> list[dict[str, str]]:
    """A chat as it stands at a turn. Its history is written down, so that every client has the same."""
    asked = QUESTIONS
    messages = [{"role": "system", "content": f"You are adviser {number % 4}. " * 20}]
    for earlier in range(turn):
        messages.append({"role": "user", "content": asked[(number + earlier) % len(asked)]})
        messages.append({"role": "assistant", "content": f"So it is, and {earlier} times."})
    return [*messages, {"role": "user", "content": asked[(number + turn) % len(asked)]}]


def is_same(got: Turn, cold: Turn) -> bool:
    """Whether the tokens are the same, up to where two are equally likely but for rounding."""
    for (token, _), (other, margin) in zip(got, cold, strict=False):
        if token != other:
            return margin < _TIE
    return len(got) == len(cold)


def honest(port: int, number: int, num_chats: int, cold: dict[tuple[int, int], Turn], report: ClientReport) -> None:
    rng = random.Random(number)
    for _ in range(num_chats):
        of = rng.randrange(_NUM_CHATS)
        for turn in range(_NUM_TURNS):
            try:
                got = ask(port, chat(of, turn))
            except Exception as error:
                report.fail(f"honest: {type(error).__name__}: {error}")
                continue
            report.note("honest answers")
            if not is_same(got, cold[of, turn]):
                report.fail(f"chat {of}, turn {turn}: {got} and not {cold[of, turn]}")


@pytest.mark.soak
def test_honest_clients_beside_hostile_ones(tmp_path: Path) -> None:
    with server_process(tmp_path / "cold.log", "--no-prefix-cache", "--max-batch", "1", "--no-settle") as (_, port):
        cold = {(of, turn): ask(port, chat(of, turn)) for of in range(_NUM_CHATS) for turn in range(_NUM_TURNS)}
    log = tmp_path / "server.log"
    options = ("--cache-bytes", "32MB", "--max-connections", "100", "--request-timeout", "5", "--read-timeout", "2")
    with server_process(log, *options, "--max-queue", "32", "--grace", "20") as (process, port):
        resident = psutil.Process(process.pid).memory_info
        before = most = resident().rss
        report, are_served = ClientReport(), threading.Event()
        clients = [
            threading.Thread(target=honest, args=(port, number, times(_NUM_EACH), cold, report), daemon=True)
            for number in range(32)
        ]
        intruders = [
            threading.Thread(target=Intruder(port, number, 0, report).run, args=(are_served,), daemon=True)
            for number in range(32)
        ]
        began_s = time.monotonic()
        until_s = began_s + times(_NUM_EACH) * _NUM_TURNS * _TIMEOUT_S
        with polling(port) as worst:
            for thread in (*clients, *intruders):
                thread.start()
            for threads in (clients, intruders):
                while any(thread.is_alive() for thread in threads):
                    time.sleep(0.2)
                    most = max(most, resident().rss)
                    assert time.monotonic() < until_s, "a client is stuck"
                are_served.set()
        seconds = time.monotonic() - began_s
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        ended_s = time.monotonic() - began_s
    print(
        f"{seconds:.0f} s on {os.cpu_count()} cores: {dict(report.seen)}",
        f"/health {worst[-1]:.3f} s at most, {(most - before) / 1e6:.0f} MB more at most",
        f"stopped in {ended_s:.1f} s, {log.stat().st_size:,} bytes of log",
        sep="\n",
        flush=True,
    )
    said = log.read_text()
    print(*(line for line in said.splitlines() if "connection" in line), sep="\n", flush=True)
    assert report.failures == []
    assert report.seen["honest answers"] == 32 * times(_NUM_EACH) * _NUM_TURNS
    assert "Traceback" not in said, said[-5000:]
    assert status == 0
    assert most - before < _MOST_GROWTH
    assert len(said) < 50_000 * seconds
