"""Replays tool-agent dialogues (tau-bench) with a thinking model's template: which prompt tokens are computed on path.

    python -m bench.tau tau_bench_gpt4o_airline.json [--dialogues 40] [--template FILE]

Each assistant message is a request with what stands before it. The dialogues hold no thoughts: before each answer the
model thinks for a number of tokens drawn from a lognormal distribution (median 150). The tools are those that the
dialogues call. No model runs: renderer, planner and prefix cache are the real ones, for a hybrid model that resumes at
snapshots only; the tokenizer is trained on the dialogues. The counts are exact for a seed.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.offline import OfflineServer, TokenTally
from bench.tiny.build import thinking_template, write_tokenizer
from bench.tiny.tokenizer import train_tokenizer
from reprise.chat.answer import Answer, ToolCall
from reprise.chat.messages.history import as_message
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.text_model import TextModel
from reprise.engine.models.load import load_text_model

VOCABULARY = 16_384
MEDIAN_THOUGHT = 150
SIGMA = 0.6
"""Of the logarithm: two thirds of the thoughts have 80 to 270 tokens."""

BOUNDS = {True: 0.035, False: 0.068}
"""The most that may be computed on path, as a share of the prompt tokens; with and without settling."""

Dialogue = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinker:
    """Draws thoughts from a text: token runs of the text, so that they read like it."""

    text_model: TextModel
    tokens: tuple[int, ...]
    source: random.Random

    def thought(self) -> str:
        """About a lognormal number of tokens, without space around them, which templates trim."""
        length = max(1, round(math.exp(self.source.gauss(math.log(MEDIAN_THOUGHT), SIGMA))))
        start = self.source.randrange(max(1, len(self.tokens) - length))
        return self.text_model.decode(self.tokens[start : start + length]).strip()


def text_model(texts: Sequence[str], template: str) -> TextModel:
    """A text model with a tokenizer of its own, in the markup of the template."""
    with tempfile.TemporaryDirectory(prefix="reprise-tau-") as folder:
        tokenizer = train_tokenizer(VOCABULARY, texts)
        write_tokenizer(Path(folder), tokenizer, template=template, eos="<|im_end|>")
        return load_text_model(folder)


def tools_of(dialogues: Sequence[Dialogue]) -> tuple[Mapping[str, Any], ...]:
    """The tools that the dialogues call, with the arguments that they give."""
    parameters: dict[str, set[str]] = {}
    for call in (call for dialogue in dialogues for message in dialogue for call in message.get("tool_calls") or ()):
        function = call["function"]
        parameters.setdefault(function["name"], set()).update(json.loads(function["arguments"]))
    return tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in sorted(keys)}},
            },
        }
        for name, keys in sorted(parameters.items())
    )


def message_of(message: Mapping[str, Any]) -> Message:
    """A message of a user, a tool or the system, as the API passes it on."""
    return {key: value for key, value in message.items() if value is not None}


def answer_of(message: Mapping[str, Any], thought: str) -> Answer:
    """What the model answers: the dialogue's own message after a thought."""
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Answer(content=message.get("content"), reasoning=thought, tool_calls=calls)


def spoken(answer: Answer) -> str:
    """What a model writes after the `<think>` of the generation prompt."""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(json.loads(call.arguments))}}}\n</tool_call>'
        for call in answer.tool_calls
    )
    return f"{answer.reasoning}\n</think>\n\n{(answer.content or '').strip()}{calls}<|im_end|>"


def replay(dialogues: Sequence[Dialogue], text: TextModel, *, settles: bool, seed: int = 1) -> TokenTally:
    """All dialogues, one after the other, on one server."""
    server = OfflineServer(Renderer(text), settles=settles)
    corpus = " ".join(message["content"] or "" for dialogue in dialogues for message in dialogue[1:])
    thinker = Thinker(text_model=text, tokens=tuple(text.encode(corpus)), source=random.Random(seed))
    tools = tools_of(dialogues)
    for dialogue in dialogues:
        history: list[Message] = []
        for message in dialogue:
            if message["role"] != "assistant":
                history.append(message_of(message))
                continue
            asked = server.ask(ChatRequest(messages=tuple(history), tools=tools))
            answer = answer_of(message, thinker.thought())
            server.answer(asked.rendered, text.encode(spoken(answer)), answer)
            history.append(as_message(answer))
    return server.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the dialogues: a JSON list of objects with `traj`")
    parser.add_argument("--dialogues", type=int, default=40, help="how many of them, from the first on")
    parser.add_argument("--template", type=Path, help="a chat template instead of the built-in one")
    options = parser.parse_args()
    dialogues: list[Dialogue] = [dialogue["traj"] for dialogue in json.loads(options.file.read_text())]
    template = thinking_template() if options.template is None else options.template.read_text()
    text = text_model([message["content"] or "" for dialogue in dialogues for message in dialogue], template)
    print("settle  requests  prompt tokens    on path   share  bound    oracle  idle tokens  seconds")
    is_within = True
    for settles, bound in BOUNDS.items():
        started = time.perf_counter()
        tally = replay(dialogues[: options.dialogues], text, settles=settles)
        is_within = is_within and tally.share <= bound
        print(
            f"{'on' if settles else 'off':6}  {tally.requests:8,}  {tally.prompt:13,}  {tally.computed:9,}"
            f"  {100 * tally.share:4.2f} %  {100 * bound:3.1f} %  {tally.oracle:8,}  {tally.settled:11,}"
            f"  {time.perf_counter() - started:7.0f}"
        )
    if not is_within:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
