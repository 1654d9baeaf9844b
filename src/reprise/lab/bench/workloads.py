"""What is asked: workloads as scripts, which say the next requests when they have heard the answers to the last.

Each is made from a seed and a size. Another seed is another beginning, so that nothing of one run helps the next. The
answers that stand in a history are those of the side that leads, for all sides: the prompts are the same everywhere.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from reprise.lab.bench.client import ClientReply, Message, Post
from reprise.lab.bench.words import text

Wave = tuple[Post, ...]
"""Requests that are sent at once."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The servers are stopped and started again."""


Step = Wave | Restart
Script = Generator[Step, Sequence[ClientReply], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is asked: `factor` 1 is some 60,000 prompt tokens in all workloads together."""

    factor: float

    def __post_init__(self) -> None:
        assert self.factor > 0, self

    def words(self, num: int) -> int:
        return max(4, round(num * self.factor))

    def times(self, num: int) -> int:
        """How often something is done: as often as at size 1 from a quarter on, and less below."""
        return num if self.factor >= 0.25 else max(3, round(num * self.factor * 4))

    @property
    def max_tokens(self) -> int:
        """Of an answer."""
        return min(64, max(8, round(32 * self.factor**0.5)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A script by its name. `about`: what it is, in half a sentence."""

    name: str
    about: str
    script: Callable[[Size, Random], Script]
    restarts: bool = False


def growing_chat(size: Size, source: Random) -> Script:
    history = [_system(source, size.words(250))]
    for _ in range(size.times(8)):
        history.append(_user(text(source, size.words(120))))
        (reply,) = yield (_chat(history, size),)
        history.append(_answer(reply, source))


def agent_loop(size: Size, source: Random) -> Script:
    tools = _tools(source)
    history = [_system(source, size.words(200)), _user(text(source, size.words(60)))]
    for step in range(size.times(8)):
        (reply,) = yield (_chat(history, size, tools=tools),)
        history.append(_call(reply, source, step))
        call_id = history[-1]["tool_calls"][0]["id"]
        history.append({"role": "tool", "tool_call_id": call_id, "content": text(source, size.words(140))})
    (reply,) = yield (_chat(history, size, tools=tools),)
    history += [_answer(reply, source), _user(text(source, size.words(60)))]
    yield (_chat(history, size, tools=tools),)


def one_document(size: Size, source: Random) -> Script:
    system, document = _system(source, 20), text(source, size.words(1500))
    for _ in range(size.times(5)):
        yield (_chat([system, _user(f"{document}\n\n{text(source, 12)}")], size),)


def one_system_prompt(size: Size, source: Random) -> Script:
    system = _system(source, size.words(600))
    yield tuple(_chat([system, _user(text(source, size.words(40)))], size) for _ in range(size.times(10)))


def translate_burst(size: Size, source: Random) -> Script:
    system = _system(source, size.words(90))
    yield tuple(_chat([system, _user(text(source, size.words(50)))], size) for _ in range(size.times(12)))


def long_beside_short(size: Size, source: Random) -> Script:
    long = [_system(source, size.words(1500)), _user(text(source, size.words(30)))]
    shorts = [[_system(source, 10), _user(text(source, size.words(30)))] for _ in range(4)]
    for _ in range(2):
        replies = yield tuple(_chat(history, size) for history in (long, *shorts))
        for history, reply in zip((long, *shorts), replies, strict=True):
            history += [_answer(reply, source), _user(text(source, size.words(30)))]


def restart(size: Size, source: Random) -> Script:
    history = [_system(source, size.words(600))]
    for turn in range(4):
        if turn == 2:
            yield Restart()
        history.append(_user(text(source, size.words(120))))
        (reply,) = yield (_chat(history, size),)
        history.append(_answer(reply, source))


WORKLOADS: tuple[Workload, ...] = (
    Workload(name="growing chat", about="one chat, turn after turn", script=growing_chat),
    Workload(name="agent loop", about="tool calls, then the user's next message", script=agent_loop),
    Workload(name="one document", about="questions after the same text", script=one_document),
    Workload(name="ten users", about="one long system prompt, all at once", script=one_system_prompt),
    Workload(name="translate burst", about="short texts, one instruction, all at once", script=translate_burst),
    Workload(name="long beside short", about="a long prompt and short ones, at once, twice", script=long_beside_short),
    Workload(name="restart", about="two turns, the server restarted, two more", script=restart, restarts=True),
)


def _chat(history: Sequence[Message], size: Size, *, tools: Sequence[Mapping[str, Any]] = ()) -> Post:
    body: dict[str, Any] = {
        "messages": list(history),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": size.max_tokens,
    }
    return Post(body=body | {"tools": list(tools)} if tools else body)


def _system(source: Random, num_words: int) -> dict[str, Any]:
    # The number makes its beginning unlike any other's.
    return {"role": "system", "content": f"Case {source.randrange(10**9)}. {text(source, num_words)}"}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer(reply: ClientReply, source: Random) -> dict[str, Any]:
    """The answer as the client returns it in the history; made-up text where it was cut while thinking."""
    content = reply.content if reply.content.strip() else text(source, 8)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reply.reasoning} if reply.reasoning else message


def _call(reply: ClientReply, source: Random, step: int) -> dict[str, Any]:
    """The model's call, or one in its place where it made none that can be sent back."""
    made = [call for call in reply.calls if call["id"] and _can_be_sent_back(call["function"])]
    path = f"part{step}/{source.randrange(10**6)}.txt"
    arguments = f'{{"path": "{path}"}}'
    call = {"id": f"call{step:05}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "tool_calls": made[:1] or [call]}
    return message | {"reasoning_content": reply.reasoning} if reply.reasoning else message


def _can_be_sent_back(function: Mapping[str, str]) -> bool:
    try:
        is_object = isinstance(json.loads(function["arguments"]), dict)
    except ValueError:
        is_object = False
    return is_object and function["name"] in ("read_file", "run")


def _tools(source: Random) -> tuple[dict[str, Any], ...]:
    # As long as an agent's, and unlike those of another run: templates may put them before everything else.
    return tuple(
        _tool(name, text(source, 25), parameter) for name, parameter in (("read_file", "path"), ("run", "line"))
    )


def _tool(name: str, about: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
