"""Runs a chat against both servers: every turn is sent twice, compared, judged and counted."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reprise.core.tokens import Tokens, common_prefix, join_tokens
from reprise.lab.demo.client import DemoFailed
from reprise.lab.demo.oracle import Oracle
from reprise.lab.demo.turns import ClientAnswer, Exchange, History, Turn

Ask = Callable[[History], ClientAnswer]


class Tokenizer(Protocol):
    """Counts tokens apart from the servers."""

    def prompt(self, history: History, /) -> Tokens: ...
    def answer(self, texts: tuple[str, ...], /) -> Tokens: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """`warm` reuses, `cold` does not; the history is what `warm` answered."""

    warm: Ask
    cold: Ask
    tokenizer: Tokenizer
    oracle: Oracle = field(default_factory=Oracle)

    def hold(self, exchanges: Iterable[Exchange], history: History, *, first: int = 1) -> Iterator[Turn]:
        """Hold the chat, one turn at a time, the first of which has the number `first`.

        Raises DemoFailed if a server's count of the prompt is not the template's.
        """
        for number, exchange in enumerate(exchanges, start=first):
            turn = self._turn(number, exchange, history)
            history = turn.history
            yield turn

    def _turn(self, number: int, exchange: Exchange, before: History) -> Turn:
        asked = (*before, {"role": "user", "content": exchange.content})
        prompt = self.tokenizer.prompt(asked)
        typed = max(1, len(prompt) - _known_before_typing(self.tokenizer, before, prompt))
        steps = [self._step(number, asked)]
        history = (*asked, steps[0].warm.message)
        if exchange.result is not None and steps[0].warm.calls:
            call_id = steps[0].warm.calls[0]["id"]
            told = (*history, {"role": "tool", "tool_call_id": call_id, "content": exchange.result})
            steps.append(self._step(number, told))
            history = (*told, steps[1].warm.message)
        return Turn(
            turn=number,
            exchange=exchange,
            answer=steps[-1].warm.content,
            history=history,
            prompt_tokens=sum(step.warm.num_prompt for step in steps),
            reused=sum(step.warm.num_cached for step in steps),
            computed=sum(step.warm.num_computed for step in steps),
            cold_computed=sum(step.cold.num_computed for step in steps),
            oracle=sum(step.oracle for step in steps),
            typed=typed,
            ttft_s=sum(step.warm.ttft_s for step in steps),
            cold_ttft_s=sum(step.cold.ttft_s for step in steps),
            is_right=is_right(exchange, [step.warm for step in steps]),
            is_cold_right=is_right(exchange, [step.cold for step in steps]),
            is_same_answer=all(step.is_same_answer for step in steps),
            why=steps[0].warm.why,
            num_encoded=sum(step.warm.num_encoded for step in steps),
            cold_encoded=sum(step.cold.num_encoded for step in steps),
        )

    def _step(self, number: int, history: History) -> "_DemoStep":
        prompt = self.tokenizer.prompt(history)
        step = _DemoStep(warm=self.warm(history), cold=self.cold(history), oracle=self.oracle.cost(prompt))
        for reply in (step.warm, step.cold):
            if reply.num_prompt != len(prompt):
                raise DemoFailed(
                    f"Turn {number}: the server counts {reply.num_prompt} prompt tokens, the template {len(prompt)}."
                )
        self.oracle.remember(join_tokens(prompt, self.tokenizer.answer(step.warm.tokens)))
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _DemoStep:
    """One request to both servers."""

    warm: ClientAnswer
    cold: ClientAnswer
    oracle: int

    @property
    def is_same_answer(self) -> bool:
        return self.warm.tokens == self.cold.tokens and self.warm.content == self.cold.content


def is_right(exchange: Exchange, replies: Sequence[ClientAnswer]) -> bool:
    """Whether the last of the replies answers the user, and the first calls the tool where it should."""
    if replies[-1].content != exchange.answer:
        return False
    calls = [json.loads(call["function"]["arguments"]) for reply in replies for call in reply.calls]
    return calls == ([] if exchange.name is None else [{"name": exchange.name}])


def _known_before_typing(tokenizer: Tokenizer, before: History, prompt: Tokens) -> int:
    """How many tokens of the prompt are the same whatever the user types, once there was a first turn."""
    if len(before) == 1:
        return 0
    stand_ins = (tokenizer.prompt((*before, {"role": "user", "content": text})) for text in ("0", "~"))
    return min(common_prefix(prompt, stand_in) for stand_in in stand_ins)
