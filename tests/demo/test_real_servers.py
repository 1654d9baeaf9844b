"""The first turns of the demonstration, on the real servers."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from reprise.demo.client import DemoFailed, ask
from reprise.demo.drive import drive
from reprise.demo.report import totals
from reprise.demo.server import server
from reprise.demo.tiny.prompts import LocalTokenizer
from reprise.demo.turns import questions, request_body
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    model = tiny_model("qwen3_5")
    with server(model, "--no-settle") as warm, server(model, "--no-settle", "--no-prefix-cache") as cold:
        yield warm, cold


@pytest.mark.soak
def test_no_more_is_computed_than_the_oracle_computes(pair: tuple[httpx.Client, httpx.Client]) -> None:
    warm, cold = pair
    tokenizer = LocalTokenizer(tiny_model("qwen3_5"))
    sums = totals(list(drive(partial(ask, warm), partial(ask, cold), tokenizer, questions()[:4])))
    assert sums.num_different == 0
    assert sums.computed <= 1.02 * sums.oracle
    assert sums.cold_computed == sums.prompt_tokens


@pytest.mark.soak
def test_a_turn_is_24_tokens_of_thinking_and_64_in_all(pair: tuple[httpx.Client, httpx.Client]) -> None:
    reply = ask(pair[0], ({"role": "user", "content": "Say something."},))
    assert len(reply.tokens) == 64
    assert reply.tokens[24] == "</think>"
    assert "</think>" not in reply.content + reply.reasoning


@pytest.mark.soak
def test_the_first_ctrl_c_finishes_the_answer_and_exits_with_0() -> None:
    command = [sys.executable, "-m", "reprise.cli.main", "serve", str(tiny_model("llama")), "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process,
        ExitStack() as last,
    ):
        # Else a test that fails would wait for it.
        last.callback(process.kill)
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        body = {**request_body(({"role": "user", "content": "Count."},)), "max_tokens": 100}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(120) == 0


def test_a_server_that_does_not_start_says_why() -> None:
    model = tiny_model("llama").parent
    with pytest.raises(DemoFailed, match=r"config\.json"), server(model):
        pass
