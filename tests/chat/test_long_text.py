"""Long texts are tokenized in stretches: the tokens are those of the whole, and who has gone is noticed in between."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.chat.templates.piecewise_tokenizer import encode_long, stretches
from reprise.core.abandon import Abandoned, abandonable
from tests.chat.text_models import text_model

WORDS = ["the", "Tokenizer", "a", "ñandú", "世界", "don't", "12", "x", "  ", "\n", "\n\n", ".", ", ", "\t", "é"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=400).map(" ".join)


@given(TEXTS, st.integers(1, 300))
def test_stretches_have_the_tokens_of_the_whole(text: str, length: int):
    encode = text_model().encode
    pieces = list(stretches(encode, text, length=length))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in encode(piece)] == encode(text)


def test_a_long_text_is_cut():
    source = random.Random(1)
    text = " ".join(source.choice(WORDS) for _ in range(2000))
    assert max(map(len, stretches(text_model().encode, text, length=300))) < 1000


def test_a_tokenizer_that_begins_every_text_in_its_own_way_gets_it_whole():
    def encode(text: str) -> list[int]:
        return [0, *map(ord, text)]

    assert list(stretches(encode, "word\nline " * 500, length=100)) == ["word\nline " * 500]


def test_nobody_waits_for_the_rest():
    given_up, asked = threading.Event(), []

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        if len(text) > 10_000:
            given_up.set()
        return [ord(character) for character in text]

    with abandonable(given_up), pytest.raises(Abandoned):
        encode_long(encode, "some words " * 100_000)
    assert sum(1 for length in asked if length > 10_000) == 1
