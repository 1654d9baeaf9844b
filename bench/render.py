"""Processor time of rendering a warm turn of a long chat, and of settling it, without a model.

    python -m bench.render [--messages 160] [--tokens 96000] [--model DIRECTORY_OR_ID]

Each repeat ends in a user message that was not seen before. Reports medians, and how much of the chat the template
rendered: 1.0 is the whole prompt once.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.streams import prose
from bench.tiny.build import thinking_template, write_tokenizer
from bench.tiny.tokenizer import demo_texts, train_tokenizer
from reprise.chat.answer import Answer, ToolCall
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.text_model import TextModel
from reprise.engine.models.load import load_text_model

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = ToolCall(id="call00001", name="look_up", arguments='{"word": "heron"}')
_CALL_MESSAGE = {
    "id": CALL.id,
    "type": "function",
    "function": {"name": CALL.name, "arguments": CALL.arguments},
}


@dataclass(eq=False)
class CountedTemplate:
    """A template that counts the characters it renders."""

    render: Callable[..., str]
    num_chars: int = 0

    def __call__(self, *given: Any, **options: Any) -> str:
        text = self.render(*given, **options)
        self.num_chars += len(text)
        return text


@dataclass(slots=True)
class Work:
    """Processor time of one kind of work in each repeat, and how often it rendered the chat."""

    took_ms: list[float] = field(default_factory=list[float])
    num_texts: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        return f"{statistics.median(self.took_ms):6.1f} ms  {statistics.median(self.num_texts):5.2f} texts"


def text_model(source: str | None) -> TextModel:
    """That of a model, or the tiny tokenizer with the demo's template."""
    if source is not None:
        return load_text_model(source)
    with TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(4000, demo_texts())
        write_tokenizer(Path(folder), tokenizer, template=thinking_template(), eos="<|im_end|>")
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "none"}), encoding="utf-8")
        return load_text_model(folder)


def chat(num_messages: int, num_words: int, *, has_tools: bool) -> list[Message]:
    """A chat that ends in an answer. With tools there are three calls between two user messages."""
    messages: list[Message] = [{"role": "system", "content": prose(0, num_words)}]
    for number in range(num_messages // 2):
        is_result = has_tools and number % 4 > 0
        calls = {"tool_calls": [_CALL_MESSAGE]} if has_tools and number % 4 < 3 else {}
        asked = {"role": "tool", "tool_call_id": CALL.id, "name": CALL.name} if is_result else {"role": "user"}
        messages.append({**asked, "content": prose(2 * number + 1, num_words)})
        thought = {"reasoning_content": prose(number, 20)}
        messages.append({"role": "assistant", "content": prose(2 * number + 2, num_words), **thought, **calls})
    return messages


def measure(model: TextModel, messages: Sequence[Message], *, has_tools: bool, repeats: int) -> None:
    assert model.render is not None
    template = CountedTemplate(model.render)
    renderer = Renderer(replace(model, render=template))
    request = ChatRequest(
        messages=(*messages, {"role": "user", "content": "Go on."}), tools=(TOOL,) if has_tools else ()
    )
    rendered = renderer.render(request)
    rendering, settling = Work(), Work()
    for number in range(repeats):
        asked: Message = {"role": "user", "content": prose(10_000 + number, 30)}
        request = replace(request, messages=(*messages, asked))
        words = prose(20_000 + number, 30)
        calls = (CALL,) if has_tools else ()
        answer = Answer(content=words, reasoning=prose(number, 20), tool_calls=calls)
        template.num_chars, start_s = 0, time.process_time()
        rendered = renderer.render(request)
        rendering.took_ms.append(1000 * (time.process_time() - start_s))
        rendering.num_texts.append(template.num_chars / len(rendered.text))
        renderer.learn(rendered, model.encode(words), answer)
        template.num_chars, start_s = 0, time.process_time()
        renderer.next_turn(rendered, answer, branch="tool" if has_tools else "user")
        settling.took_ms.append(1000 * (time.process_time() - start_s))
        settling.num_texts.append(template.num_chars / len(rendered.text))
    print(f"{len(rendered.prompt):,} tokens, {len(request.messages)} messages, {'tools' if has_tools else 'no tools'}")
    print(f"  render  {rendering}")
    print(f"  settle  {settling}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=96_000, help="of the whole chat, about (default: 96000)")
    parser.add_argument("--model", help="whose tokenizer and template are used (default: those of the tiny models)")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    model = text_model(options.model)
    num_words = int(300 * options.tokens / options.messages / len(model.encode(prose(0, 300))))
    for has_tools in (False, True):
        messages = chat(options.messages, num_words, has_tools=has_tools)
        measure(model, messages, has_tools=has_tools, repeats=options.repeats)


if __name__ == "__main__":
    sys.exit(main())
