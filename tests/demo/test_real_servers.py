"""The first turns of the demonstration, on the real servers."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from reprise.lab.bench.server_process import ServerFailed, server
from reprise.lab.demo import story
from reprise.lab.demo.client import ask
from reprise.lab.demo.drive import Drive
from reprise.lab.demo.facts import LOOK_UP_TOOL
from reprise.lab.demo.prompts import LocalTokenizer
from reprise.lab.demo.report import all_turns, totals
from reprise.lab.demo.show import hold_chats
from reprise.lab.demo.turns import OPENING, request_body
from tests.demo.trained import MODEL
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    with server(MODEL, "--no-settle") as warm, server(MODEL, "--no-settle", "--no-prefix-cache") as cold:
        yield warm, cold


@pytest.mark.soak
def test_answers_are_right_and_no_more_is_computed_than_the_oracle_computes(
    pair: tuple[httpx.Client, httpx.Client],
) -> None:
    warm, cold = (partial(ask, client) for client in pair)
    drive = Drive(warm=warm, cold=cold, tokenizer=LocalTokenizer(MODEL, tools=[LOOK_UP_TOOL]))
    lines = ("tell Hugo pet Luna", "tell Leo city Oslo", "ask Hugo pet", "ask Leo city", "ask Ida food")
    sums = totals(list(drive.hold(story.exchanges(lines), OPENING)))
    assert (sums.num_right, sums.num_cold_right, sums.num_different) == (5, 5, 0)
    assert sums.computed <= 1.02 * sums.oracle
    assert sums.cold_computed == sums.prompt_tokens


@pytest.mark.soak
def test_the_whole_demonstration() -> None:
    heard: list[str] = []
    parts = hold_chats(lambda kind, text: heard.append(f"{kind}: {text}"))
    chat, whole = totals(parts[0].turns), totals(all_turns(parts))
    assert whole.num_different == 0
    assert whole.num_right >= 0.95 * whole.num_turns
    assert chat.computed <= 1.02 * chat.oracle
    assert "event: the server is stopped and started again" in heard


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


@pytest.mark.matrix
def test_a_server_that_does_not_start_says_why() -> None:
    model = tiny_model("llama").parent
    with pytest.raises(ServerFailed, match=r"config\.json"), server(model):
        pass
