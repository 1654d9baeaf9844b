"""The trained model judges its recurrent state: whatever is wrong with it, answers are wrong in words."""

from collections.abc import Callable, Sequence

import pytest

from reprise.core.tokens import as_tokens, common_prefix
from reprise.demo import story
from reprise.demo.facts import FactExchange
from reprise.demo.turns import OPENING, Message
from tests.demo.trained import after, answer, fresh, prompt_of, tokenizer

RECURRENT = 0
"""The layer that remembers. The one of attention does nothing that is seen in words: no judge of its state."""
TOLD = (
    *("tell Hugo pet Luna", "tell Anna pet Rex"),
    *("tell Paul code R47", "tell Mara code K82", "tell Clara code B58"),
    *("tell Leo code T31", "tell Ida code Z19", "tell Greta code M64"),
    *("tell Hugo pet Coco", "tell Anna pet Nala"),
)
OTHERWISE = (
    *("tell Hugo pet Max", "tell Anna pet Milo"),
    *("tell Paul code C15", "tell Mara code W73", "tell Clara code H29"),
    *("tell Leo code A96", "tell Ida code N50", "tell Greta code D38"),
    *("tell Hugo pet Ruby", "tell Anna pet Daisy"),
)
ASKED = tuple(dict.fromkeys(f"ask {' '.join(line.split()[1:3])}" for line in TOLD))


def history_of(told: Sequence[FactExchange]) -> list[Message]:
    """The messages of a chat in which the model answered right."""
    history: list[Message] = [*OPENING]
    for exchange in told:
        history += [{"role": "user", "content": exchange.user}, {"role": "assistant", "content": exchange.answer}]
    return history


class ChatState:
    """What the model holds after a chat, and the questions that can follow."""

    def __init__(self, told: tuple[str, ...]) -> None:
        history = history_of(story.exchanges(told))
        asked = [story.exchanges((*told, line))[-1] for line in ASKED]
        prompts = [prompt_of((*history, {"role": "user", "content": exchange.user})) for exchange in asked]
        first, *others = (as_tokens(prompt) for prompt in prompts)
        known = min(common_prefix(first, other) for other in others)
        self.tokens = prompts[0][:known]
        self.rows = after(self.tokens)
        self._questions = [
            (prompt[known:], f"{exchange.thought}\n</think>\n\n{exchange.answer}")
            for prompt, exchange in zip(prompts, asked, strict=True)
        ]

    def num_right(self) -> int:
        return sum(answer(self.rows.copy_rows([0]), rest) == right for rest, right in self._questions)


def swap(state: ChatState) -> None:
    """With that of another chat of the same length."""
    other = ChatState(OTHERWISE)
    assert other.rows.lengths == state.rows.lengths
    state.rows.caches[RECURRENT] = other.rows.caches[RECURRENT]


def drop(state: ChatState) -> None:
    state.rows.caches[RECURRENT] = fresh().caches[RECURRENT]


def test_the_state_as_it_is_gives_right_answers() -> None:
    assert ChatState(TOLD).num_right() == len(ASKED)


@pytest.mark.parametrize("damage", [swap, drop])
def test_damage_to_the_recurrent_state_makes_answers_wrong(damage: Callable[[ChatState], None]) -> None:
    state = ChatState(TOLD)
    damage(state)
    assert state.num_right() == 0


@pytest.mark.parametrize("line", ["tell Ben code F63", "tell Hugo pet Luna", "tell Ben food soup"])
def test_a_recurrent_state_that_is_one_token_behind_takes_a_fact_in_wrong(line: str) -> None:
    (*before, told) = story.exchanges((*TOLD, line))
    prompt = prompt_of((*history_of(before), {"role": "user", "content": told.user}))
    value = tokenizer().encode(told.user, add_special_tokens=False)[-2]
    known = len(prompt) - prompt[::-1].index(value)
    rows, behind = after(prompt[:known]), after(prompt[: known - 1])
    right = f"{told.thought}\n</think>\n\n{told.answer}"
    assert answer(rows.copy_rows([0]), prompt[known:]) == right
    rows.caches[RECURRENT] = behind.caches[RECURRENT]
    assert answer(rows, prompt[known:]) != right
