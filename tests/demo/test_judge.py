"""The trained model judges its state: of its recurrent layer by its words, of attention by how likely they are."""

from collections.abc import Callable, Sequence
from random import Random

import pytest

from reprise.core.job import Sampling
from reprise.core.tokens import as_tokens, common_prefix
from reprise.lab.bench.words import text
from reprise.lab.demo import story
from reprise.lab.demo.facts import FactExchange
from reprise.lab.demo.turns import OPENING, Message
from tests.demo.damage import Damage, confuse, damage_all, falling_behind, lose, replace_layer, shift
from tests.demo.trained import MODEL, after, answer, fresh, loaded, prompt_of, tokenizer
from tests.loop.driving import DrivenEngine
from tests.loop.test_audit import audited
from tests.matrix import now_and_later

RECURRENT = 0
"""The layer that remembers. What is wrong with that of attention is not seen in words."""
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
    replace_layer(state.rows, RECURRENT, other.rows)


def drop(state: ChatState) -> None:
    replace_layer(state.rows, RECURRENT, fresh())


def test_the_state_as_it_is_gives_right_answers() -> None:
    assert ChatState(TOLD).num_right() == len(ASKED)


@pytest.mark.parametrize("damage", [swap, drop])
def test_damage_to_the_recurrent_state_makes_answers_wrong(damage: Callable[[ChatState], None]) -> None:
    state = ChatState(TOLD)
    damage(state)
    assert state.num_right() == 0


@pytest.mark.parametrize("line", now_and_later(["tell Hugo pet Luna"], ["tell Ben code F63", "tell Ben food soup"]))
def test_a_recurrent_state_that_is_one_token_behind_takes_a_fact_in_wrong(line: str) -> None:
    (*before, told) = story.exchanges((*TOLD, line))
    prompt = prompt_of((*history_of(before), {"role": "user", "content": told.user}))
    value = tokenizer().encode(told.user, add_special_tokens=False)[-2]
    known = len(prompt) - prompt[::-1].index(value)
    rows, behind = after(prompt[:known]), after(prompt[: known - 1])
    right = f"{told.thought}\n</think>\n\n{told.answer}"
    assert answer(rows.copy_rows([0]), prompt[known:]) == right
    replace_layer(rows, RECURRENT, behind)
    assert answer(rows, prompt[known:]) != right


FREELY = Sampling(temperature=1.0, seed=3)
"""Of words that it does not know the model is sure of nothing, so that what attention adds is seen."""


def free_text(seed: int) -> list[int]:
    return tokenizer().encode(text(Random(seed), 40), add_special_tokens=False)


@pytest.mark.matrix
@pytest.mark.parametrize("damage", now_and_later([None, falling_behind(128)], [shift, lose, confuse]))
def test_damage_to_the_state_of_attention_is_found_by_the_audit(damage: Damage | None) -> None:
    engine = DrivenEngine(MODEL, load=loaded, is_audit_off=False, audit_rate=1.0)
    try:
        prompt, other = free_text(1), free_text(2)
        for tokens in (prompt, other):
            engine.run(tokens)
        audited(engine, 2)
        if damage is not None:
            engine.ask(lambda worker: damage_all(worker, damage))
        longer = engine.run([*prompt, *free_text(3)[:4]], num=48, sampling=FREELY)
        totals = audited(engine, 3)
    finally:
        engine.close()
    assert longer.end.outcome.num_reused > 0
    assert totals.num_different == (damage is not None)
