"""Holds chats with the demo's model, cold, and counts right answers by kind and distance.

`python -m tools.train_demo.evaluate [DIRECTORY] [--chats N] [--turns N] [--at-least PERCENT]` runs mlx-lm alone: every
answer is computed from the first token of its chat, and the history is what the model itself said. An answer is right
if its thought, its words and its call are, to the letter.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

import reprise.lab.demo
from bench.fact_chats import random_chat
from reprise.lab.demo.facts import LOOK_UP_TOOL, SYSTEM_PROMPT, FactExchange
from tools.train_demo.render import call_text

SHIPPED = Path(reprise.lab.demo.__file__).parent / "model"
MAX_TOKENS = 64
SEED = 770_000
"""Training draws its chats from one stream of seed 1000 + its own; these are others."""
DISTANCES = (3, 8, 16, 99)


class ColdChat:
    """A chat with the model as mlx-lm runs it."""

    def __init__(self, directory: Path) -> None:
        self._model, self._tokenizer = load(str(directory))
        self._has_tool = False
        self._messages: list[dict[str, Any]] = []

    def start(self, *, has_tool: bool, has_system: bool) -> None:
        self._has_tool = has_tool
        self._messages = [{"role": "system", "content": SYSTEM_PROMPT}] if has_system else []

    def is_right(self, exchange: FactExchange) -> bool:
        """Say the user's part, and the tool's where it is called; whether the model's part is right."""
        self._messages.append({"role": "user", "content": exchange.user})
        wanted = f"{exchange.thought}\n</think>\n\n"
        if exchange.name is None:
            return self._say() == wanted + exchange.answer
        if self._say() != wanted + call_text(exchange.name):
            return False
        self._messages.append({"role": "tool", "content": exchange.result})
        return self._say() == f"{exchange.answer}\n</think>\n\n{exchange.answer}"

    def _say(self) -> str:
        """The model's next words, which the history gets without the thought."""
        prompt = self._tokenizer.apply_chat_template(
            self._messages, tools=[LOOK_UP_TOOL] if self._has_tool else None, add_generation_prompt=True
        )
        tokens: list[int] = []
        for token, _ in generate_step(mx.array(prompt), self._model, max_tokens=MAX_TOKENS):
            if token in self._tokenizer.eos_token_ids:
                break
            tokens.append(int(token))
        text = self._tokenizer.decode(tokens)
        thought, _, answer = text.partition("</think>")
        message: dict[str, Any] = {"role": "assistant", "content": answer.strip()}
        if "<tool_call>" in answer:
            name = answer.partition("<parameter=name>")[2].partition("</parameter>")[0].strip()
            function = {"name": "look_up", "arguments": {"name": name}}
            message |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
            message["reasoning_content"] = thought.strip()
        self._messages.append(message)
        return text


def evaluate(directory: Path, *, num_chats: int, num_turns: int) -> dict[str, list[bool]]:
    """What was right, by kind and distance. Half of the chats may call the tool."""
    found: dict[str, list[bool]] = defaultdict(list)
    chat = ColdChat(directory)
    for number in range(num_chats):
        has_tool = number % 2 == 0
        chat.start(has_tool=has_tool, has_system=number % 3 == 0)
        for exchange in random_chat(Random(SEED + number), num_turns, has_tool=has_tool):
            right = chat.is_right(exchange)
            found["all"].append(right)
            name = exchange.measure
            if exchange.age > 0:
                name += f", mentioned up to {next(limit for limit in DISTANCES if exchange.age <= limit)} turns ago"
            found[name].append(right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--chats", type=int, default=25)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--at-least", type=float, default=0.0, help="percent of all that have to be right")
    options = parser.parse_args()
    found = evaluate(options.directory, num_chats=options.chats, num_turns=options.turns)
    shares = {name: 100 * sum(right) / len(right) for name, right in found.items()}
    for name, share in sorted(shares.items()):
        print(f"{name:45} {share:6.1f} % of {len(found[name])}")
    verdict = f"{shares['all']:.1f} % of all are right"
    if shares["all"] < options.at_least:
        sys.exit(f"FAILED: {verdict}, less than the {options.at_least:.1f} % that are asked for.")
    if options.at_least > 0:
        print(f"Passed: {verdict}, and {options.at_least:.1f} % are asked for.")


if __name__ == "__main__":
    main()
