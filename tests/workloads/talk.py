"""What is said in the workloads: users' questions, models' answers with thoughts, tools and what they give."""

from typing import Any

from bench.tiny.tokenizer import demo_texts
from reprise.chat.answer import Answer, ToolCall
from tests.workloads.serving import Message

SYSTEM_PROMPT = (
    "You are a patient adviser. Answer in plain words, name what you are not sure of, and keep to what was asked. "
    "When numbers are given, use them."
)
_PROSE, _CHAT = demo_texts()
QUESTIONS = tuple(_CHAT.splitlines())
"""Forty, each another."""


def system(text: str = SYSTEM_PROMPT) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def thoughtful(number: int) -> Answer:
    """An answer with thoughts of its own."""
    return Answer(
        content=f"Number {number + 2}.",
        reasoning=f"So {number + 1}?",
    )


def whole_prose() -> str:
    """A text of some two thousand tokens."""
    return _PROSE


def prose() -> str:
    """A text of some six hundred tokens."""
    return whole_prose()[:1500]


def _tool(name: str, about: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }


TOOLS = (
    _tool("read_file", "Gives the text of a file, from its first line to its last.", "path"),
    _tool("write_file", "Writes a text to a file, in place of what was there.", "path", "text"),
    _tool("run", "Runs a command and gives what it printed.", "command"),
)


def calling(step: int) -> Answer:
    """A step of an agent: a thought and a tool call."""
    arguments = f'{{"path": "{step}.py"}}'
    return Answer(
        content=None,
        reasoning=f"Is it in {step}?",
        tool_calls=(ToolCall(id=f"call{step:05}", name="read_file", arguments=arguments),),
    )


def result(message: Message, step: int) -> Message:
    """What the tool gives for the call in this message."""
    call_id = message["tool_calls"][0]["id"]
    text = f"def part_{step}(rows):\n    total = {step * 17 % 23}\n    return [total + row for row in rows]\n"
    return {"role": "tool", "tool_call_id": call_id, "content": text}
