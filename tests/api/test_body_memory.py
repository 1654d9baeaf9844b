"""What a body costs in memory while it is read and refused: measured as the system does, in another process."""

import http.client
import json
import re
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pytest

from tests.api.server_process import server_process

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc"),
    pytest.mark.matrix,
]

MB = 2**20
_SLACK_NBYTES = 16 * MB
"""What does not grow with the body: blocks in which it is counted, and what malloc keeps of a thread's first large
texts (an arena for each of the threads that a body passes)."""

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(*messages: object) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def calling(size: int, *, num_texts: int = 1) -> bytes:
    call = {"name": "look", "arguments": json.dumps({"of": ["word " * (size // 5 // num_texts)] * num_texts})}
    asks = {"role": "assistant", "tool_calls": [{"id": "call0", "type": "function", "function": call}]}
    return chat(user("x"), asks, {"role": "tool", "tool_call_id": "call0", "content": "x"})


BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "objects as prompts": (_COMPLETIONS, lambda size: b'{"prompt": [' + b"{}," * (size // 3) + b"{}]}"),
    "lists in a field": (_CHAT, lambda size: b'{"metadata": [' + b"[]," * (size // 3) + b"[]]}"),
    "a completion": (_COMPLETIONS, lambda size: json.dumps({"prompt": "word " * (size // 5)}).encode()),
    "a chat": (_CHAT, lambda size: chat(user("again and again " * (size // 16)))),
    "a chat in other letters": (_CHAT, lambda size: chat(user("é漢😀 " * (size // 25)))),
    "arguments of a call": (_CHAT, calling),
    "many arguments of a call": (_CHAT, partial(calling, num_texts=100)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[int, int]]:
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process(log, architecture="llama") as (process, port):
        for _ in range(2):
            for path, body in BODIES.values():
                assert post(port, path, body(100_000)) == 400
        yield process.pid, port


def post(port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def memory(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


@pytest.mark.parametrize("size", [4 * MB, MB], ids=["4 MB", "1 MB"])
@pytest.mark.parametrize("name", BODIES)
def test_memory_stays_below_three_times_the_body(server: tuple[int, int], name: str, size: int):
    pid, port = server
    path, body = BODIES[name]
    written = body(size)
    before = memory(pid, "VmRSS")
    try:
        # The peak begins anew.
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    assert post(port, path, written) == 400
    assert memory(pid, "VmHWM") - before < 3 * len(written) + _SLACK_NBYTES
