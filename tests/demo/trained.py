"""The model that ships with the demonstration, run without the loop: prompts, and answers from a given state."""

import functools
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

import reprise
import reprise.lab.demo
from reprise.lab.demo.turns import History

MODEL = Path(reprise.lab.demo.__file__).parent / "model"
MAX_TOKENS = 64


@functools.cache
def loaded() -> reprise.LoadedModel:
    return reprise.load_model(str(MODEL))


@functools.cache
def tokenizer() -> TokenizerWrapper:
    return load(MODEL)


def prompt_of(history: History) -> list[int]:
    """The tokens of the chat, ready for the answer."""
    return tokenizer().apply_chat_template(list(history), add_generation_prompt=True)


def fresh() -> reprise.SequenceBatch:
    return reprise.SequenceBatch(loaded().blueprint)


def after(tokens: Sequence[int]) -> reprise.SequenceBatch:
    """A sequence that has computed these tokens."""
    rows = fresh()
    mx.eval(rows.forward(loaded().model, mx.array([list(tokens)])), rows.arrays())
    return rows


def answer(rows: reprise.SequenceBatch, rest: Sequence[int]) -> str:
    """What the model says, thought and all, when the rest of its prompt is computed on this state."""
    model, words = loaded().model, list[int]()
    step = list(rest)
    for _ in range(MAX_TOKENS):
        token = int(mx.argmax(rows.forward(model, mx.array([step]))[0, -1]).item())
        if token in tokenizer().eos_token_ids:
            break
        words.append(token)
        step = [token]
    return tokenizer().decode(words)
