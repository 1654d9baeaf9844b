"""Cutting at seams and tokenizing piece by piece."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reprise.chat.templates.piecewise_tokenizer import PieceTokenizer, Seams, Spelled
from reprise.chat.text_model import TextModel
from reprise.core.tokens import as_tokens
from tests.chat.text_models import ADDED, SPECIAL, make_text_model, text_model
from tests.matrix import examples

MODEL = text_model()
MARKUP = st.sampled_from([*SPECIAL, *ADDED, "<|im_", "<think", "\n", " ", "  ", "user", "Alpha"])
TEXTS = st.lists(st.one_of(MARKUP, st.text(max_size=8)), max_size=12).map("".join)


def spelled_out(text: str) -> list[int]:
    """The tokens of a text, other than the tokenizer would write it: letter by letter, markup aside."""
    seams = Seams(MODEL.encode, MODEL.splitters)
    tokens: list[int] = []
    for piece in seams.cut(text):
        mark = next((mark for mark in sorted(MODEL.splitters, key=len, reverse=True) if piece.startswith(mark)), "")
        tokens += MODEL.encode(mark) if mark != "" else []
        for letter in piece[len(mark) :]:
            tokens += MODEL.encode(letter)
    return tokens


def counting(model: TextModel) -> tuple[TextModel, list[int]]:
    """The model, and a list of how many characters were given to its tokenizer, one entry for each call."""
    calls: list[int] = []

    def encode(text: str) -> list[int]:
        calls.append(len(text))
        return model.encode(text)

    return replace(model, encode=encode), calls


@given(text=TEXTS)
@settings(max_examples=examples(50), deadline=None)
def test_tokens_of_the_pieces_are_the_tokens_of_the_whole(text: str) -> None:
    tokenized = PieceTokenizer(MODEL).tokenize(text)
    assert tokenized.tokens.tolist() == MODEL.encode(text)
    assert "".join(piece.text for piece in tokenized.pieces) == text


@given(text=TEXTS, other=TEXTS, stem=TEXTS)
@settings(max_examples=examples(50), deadline=None)
def test_shared_is_the_common_prefix_of_the_tokens(text: str, other: str, stem: str) -> None:
    tokenizer = PieceTokenizer(MODEL)
    known = tokenizer.tokenize(stem + text)
    a, b = MODEL.encode(stem + text), MODEL.encode(stem + other)
    longest = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    # A common prefix may end anywhere in a piece, but at pieces that differ in length it is not followed further.
    assert tokenizer.shared(known, stem + other) <= longest
    assert a[: tokenizer.shared(known, stem + other)] == b[: tokenizer.shared(known, stem + other)]
    assert tokenizer.shared(known, stem + text) == len(a)


@settings(max_examples=examples(50), deadline=None)
@given(answer=st.lists(st.one_of(st.sampled_from(ADDED), st.text(alphabet="ab é世\n ", max_size=6)), max_size=6))
def test_sampled_tokens_come_back_where_they_were_sampled_and_only_there(answer: list[str]) -> None:
    tokenizer = PieceTokenizer(MODEL)
    prompt = tokenizer.tokenize("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    text = "".join(answer)
    sampled = spelled_out(text)
    assert MODEL.decode(sampled) == text
    tokenizer.learn(prompt, sampled)
    grown = tokenizer.tokenize("".join(p.text for p in prompt.pieces) + text + "<|im_end|>\n")
    assert grown.tokens.tolist()[: len(prompt.tokens) + len(sampled)] == [*prompt.tokens.tolist(), *sampled]
    elsewhere = "<|im_start|>user\nOther<|im_end|>\n<|im_start|>assistant\n" + text + "<|im_end|>\n"
    assert tokenizer.tokenize(elsewhere).tokens.tolist() == MODEL.encode(elsewhere)


@settings(max_examples=examples(50), deadline=None)
@given(
    texts=st.lists(
        st.one_of(st.sampled_from([*SPECIAL, *ADDED]), st.text(alphabet="ab é世\n ", max_size=6)), max_size=12
    ),
    odd=st.sets(st.integers(0, 11)),
    cuts=st.sets(st.integers(0, 60)),
)
def test_stored_tokens_are_spelled_again_as_they_were(texts: list[str], odd: set[int], cuts: set[int]) -> None:
    """However the tokens are cut into runs."""
    seams = Seams(MODEL.encode, MODEL.splitters)
    pieces = list(seams.cut("".join(texts)))
    tokens = [token for i, piece in enumerate(pieces) for token in (spelled_out if i in odd else MODEL.encode)(piece)]
    tokenizer = PieceTokenizer(MODEL)
    ends = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    spelled = Spelled()
    for start, stop in itertools.pairwise(ends):
        spelled = tokenizer.recall(spelled, tokens[start:stop])
    tokenizer.recall_end(spelled)
    assert tokenizer.tokenize("".join(texts)).tokens.tolist() == tokens
    more = "".join(texts) + "<|im_end|>\n"
    assert tokenizer.tokenize(more).tokens.tolist() == [*tokens, *MODEL.encode("<|im_end|>\n")]


def test_recalling_costs_the_tokenizer_each_piece_once() -> None:
    model, calls = counting(MODEL)
    tokenizer = PieceTokenizer(model)
    calls.clear()
    text = "<|im_start|>user\n" + "one word and the next " * 2_000 + "<|im_end|>\n"
    tokens = MODEL.encode(text)
    spelled = Spelled()
    for start in range(0, len(tokens), 64):
        spelled = tokenizer.recall(spelled, tokens[start : start + 64])
    tokenizer.recall_end(spelled)
    assert sum(calls) <= 1.1 * len(text) + 200


def test_another_text_in_the_same_place_is_tokenized_as_ever() -> None:
    tokenizer = PieceTokenizer(MODEL)
    start = "<|im_start|>assistant\n"
    tokenizer.learn(tokenizer.tokenize(start), spelled_out("Hello there<|im_end|>"))
    assert tokenizer.tokenize(start + "Hello there!<|im_end|>").tokens.tolist() == MODEL.encode(
        start + "Hello there!<|im_end|>"
    )


def test_what_is_equal_is_not_tokenized_again_to_be_compared() -> None:
    model, calls = counting(MODEL)
    # No memory: what is looked up is tokenized.
    tokenizer = PieceTokenizer(model, nbytes=0)
    chat = "<|im_start|>user\nHello there<|im_end|>\n" * 100
    known = tokenizer.tokenize(chat + "<|im_start|>user\nAlpha")
    calls.clear()
    assert tokenizer.shared(known, chat + "<|im_start|>user\nBravo") == len(MODEL.encode(chat + "<|im_start|>user\n"))
    assert sum(calls) < 100


def test_another_spelling_learned_since_is_compared() -> None:
    tokenizer = PieceTokenizer(MODEL)
    start, text = "<|im_start|>assistant\n", "Hello there<|im_end|>\n"
    prompt, known = tokenizer.tokenize(start), tokenizer.tokenize(start + text)
    assert tokenizer.shared(known, start + text) == len(known.tokens)
    tokenizer.learn(prompt, spelled_out("Hello there<|im_end|>"))
    assert tokenizer.shared(known, start + text) < len(known.tokens)


def test_tokens_that_spell_a_seam_out_are_not_used() -> None:
    tokenizer = PieceTokenizer(MODEL)
    start = "<|im_start|>assistant\n"
    by_letter = [token for letter in "x<think>y" for token in MODEL.encode(letter)]
    assert MODEL.decode(by_letter) == "x<think>y"
    tokenizer.learn(tokenizer.tokenize(start), by_letter)
    text = start + "x<think>y"
    assert tokenizer.tokenize(text).tokens.tolist() == MODEL.encode(text)


def test_canonical_tokens_learn_nothing() -> None:
    tokenizer = PieceTokenizer(MODEL, is_faithful=False)
    start = "<|im_start|>assistant\n"
    tokenizer.learn(tokenizer.tokenize(start), spelled_out("Hello there<|im_end|>"))
    text = start + "Hello there<|im_end|>"
    assert tokenizer.tokenize(text).tokens.tolist() == MODEL.encode(text)


def test_growth_costs_the_tokenizer_what_grew() -> None:
    model, calls = counting(MODEL)
    tokenizer = PieceTokenizer(model)
    message = "<|im_start|>user\nThe quick brown fox jumps over the lazy dog.<|im_end|>\n"
    long = "".join(f"{message}{number}" for number in range(2_000))
    tokenizer.tokenize(long)
    calls.clear()
    tail = "<|im_start|>assistant\nA new answer.<|im_end|>\n"
    grown = tokenizer.tokenize(long + tail)
    assert sum(calls) <= len(tail)
    assert grown.tokens.tolist() == MODEL.encode(long + tail)


def test_what_was_sampled_costs_the_tokenizer_nothing() -> None:
    model, calls = counting(MODEL)
    tokenizer = PieceTokenizer(model)
    prompt = tokenizer.tokenize("<|im_start|>assistant\n")
    tokenizer.learn(prompt, MODEL.encode("<think>\nHm.\n</think>\n\nHello there"))
    tokenizer.tokenize("<|im_end|>\n")
    calls.clear()
    tokenizer.tokenize("<|im_start|>assistant\n<think>\nHm.\n</think>\n\nHello there<|im_end|>\n")
    assert calls == []


def small_tokenizer(*added: AddedToken, prepend_scheme: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if prepend_scheme is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["a b c the cat sat on the mat\n\n user assistant ▁"], trainer)
    tokenizer.add_tokens(list(added))  # pyright: ignore[reportUnknownMemberType]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


ODD_TOKENS = {
    "plain": [AddedToken("<s>", normalized=False)],
    "swallows space on the right": [AddedToken("<r>", rstrip=True, normalized=False)],
    "swallows space on the left": [AddedToken("<l>", lstrip=True, normalized=False)],
    "whole words only": [AddedToken("cat", single_word=True, normalized=False)],
    "nested": [AddedToken("<a", normalized=False), AddedToken("<a>", normalized=False)],
    "one in another": [AddedToken("<x>", normalized=False), AddedToken("<x><x>!", normalized=False)],
    "line breaks": [AddedToken("\n", normalized=False), AddedToken("\n\n", normalized=False)],
    "together": [
        AddedToken("<s>", normalized=False),
        AddedToken("<r>", rstrip=True, normalized=False),
        AddedToken("<l>", lstrip=True, normalized=False),
        AddedToken("cat", single_word=True, normalized=False),
    ],
    "none": [],
}


@pytest.mark.parametrize("prepend_scheme", [None, "first", "always", "never"])
@pytest.mark.parametrize("name", ODD_TOKENS)
def test_odd_added_tokens(name: str, prepend_scheme: str | None) -> None:
    model = make_text_model(small_tokenizer(*ODD_TOKENS[name], prepend_scheme=prepend_scheme))
    words = [*model.splitters, "a", " ", "\n", "\n\n", "the", " cat", "1", "<a"]
    tokenizer = PieceTokenizer(model)
    for seed in range(60):
        text = "".join(words[(seed * 7 + n * n * 5 + seed * n) % len(words)] for n in range(10))
        assert tokenizer.tokenize(text).tokens.tolist() == model.encode(text), repr(text)


def test_a_tokenizer_that_is_no_sum_of_its_pieces_is_given_whole_texts() -> None:
    def encode(text: str) -> list[int]:
        # The first token depends on the whole length: nothing may be cut.
        return [len(text), *(ord(letter) for letter in text)]

    seams = Seams(encode, {"<": ord("<")})
    assert list(seams.cut("a<b<c")) == ["a<b<c"]


def test_the_longest_token_wins() -> None:
    model = make_text_model(small_tokenizer(*ODD_TOKENS["one in another"]))
    assert list(Seams(model.encode, model.splitters).cut("a<x><x>!b<x>c")) == ["a", "<x><x>!b", "<x>c"]


def test_positions_and_pieces() -> None:
    tokenized = PieceTokenizer(MODEL).tokenize("Ab<think>cd</think>")
    first, second, third = tokenized.pieces
    assert [piece.char_at for piece in (first, second, third)] == [0, 2, 11]
    assert tokenized.piece_of_token(first.token_at) is first
    assert tokenized.piece_of_token(len(tokenized.tokens)) is None


def test_an_empty_text_has_no_pieces() -> None:
    tokenizer = PieceTokenizer(MODEL)
    empty = tokenizer.tokenize("")
    assert empty.pieces == ()
    assert empty.tokens.tolist() == []
    tokenizer.learn(empty, as_tokens([1, 2]).tolist())


def test_the_memory_is_bounded() -> None:
    model, calls = counting(MODEL)
    tokenizer = PieceTokenizer(model, nbytes=2_000)
    pieces: Sequence[str] = [f"<think>{number}" for number in range(100)]
    for piece in pieces:
        tokenizer.tokenize(piece)
    calls.clear()
    tokenizer.tokenize(pieces[-1])
    assert calls == []
    tokenizer.tokenize(pieces[0])
    assert calls != []
