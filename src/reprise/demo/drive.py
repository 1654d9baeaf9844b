"""The forty turns: both servers are asked the same, and every turn is compared and counted."""

from collections.abc import Callable, Iterator
from typing import Protocol

from reprise.core.tokens import Tokens, common_prefix, join_tokens
from reprise.demo.client import DemoFailed
from reprise.demo.oracle import Oracle
from reprise.demo.turns import SYSTEM_PROMPT, ClientAnswer, Message, Turn

Ask = Callable[[tuple[Message, ...]], ClientAnswer]


class Tokenizer(Protocol):
    """Counts tokens apart from the servers."""

    def prompt(self, history: tuple[Message, ...], /) -> Tokens: ...
    def answer(self, texts: tuple[str, ...], /) -> Tokens: ...


def drive(warm: Ask, cold: Ask, tokenizer: Tokenizer, questions: tuple[str, ...]) -> Iterator[Turn]:
    """Hold the chat with both servers, one turn at a time.

    `warm` reuses, `cold` does not; the history is what `warm` answered. Raises DemoFailed if a server's count of the
    prompt is not the template's.
    """
    oracle = Oracle()
    history: tuple[Message, ...] = ({"role": "system", "content": SYSTEM_PROMPT},)
    for number, question in enumerate(questions, start=1):
        before = history
        history = (*before, {"role": "user", "content": question})
        prompt = tokenizer.prompt(history)
        with_reuse, without = warm(history), cold(history)
        for reply in (with_reuse, without):
            if reply.num_prompt != len(prompt):
                raise DemoFailed(
                    f"Turn {number}: the server counts {reply.num_prompt} prompt tokens, the template {len(prompt)}."
                )
        yield Turn(
            turn=number,
            prompt_tokens=len(prompt),
            reused=with_reuse.num_cached,
            computed=with_reuse.num_computed,
            cold_computed=without.num_computed,
            oracle=oracle.cost(prompt),
            typed=max(1, len(prompt) - _known_before_typing(tokenizer, before, prompt)),
            ttft_s=with_reuse.ttft_s,
            cold_ttft_s=without.ttft_s,
            is_same_answer=with_reuse.tokens == without.tokens and with_reuse.content == without.content,
            why=with_reuse.why,
        )
        oracle.remember(join_tokens(prompt, tokenizer.answer(with_reuse.tokens)))
        history = (*history, {"role": "assistant", "content": with_reuse.content})


def _known_before_typing(tokenizer: Tokenizer, before: tuple[Message, ...], prompt: Tokens) -> int:
    """How many tokens of the prompt are the same whatever the user types, once there was a first turn."""
    if len(before) == 1:
        return 0
    stand_ins = (tokenizer.prompt((*before, {"role": "user", "content": text})) for text in ("0", "~"))
    return min(common_prefix(prompt, stand_in) for stand_in in stand_ins)
