"""How few tokens a text can be: never more than it is, and close to it where a text is made of the longest tokens."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.chat.extent import TokenExtent, extent_of
from reprise.chat.rendering.render import Renderer, RenderSettings
from reprise.chat.request import ChatRequest
from reprise.core.errors import ContextTooLong
from tests.chat.text_models import backend_tokenizer, text_model

EXTENT = extent_of(backend_tokenizer().to_str())
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from([*backend_tokenizer().get_vocab()]), max_size=40).map("".join),
    st.text(alphabet="ab1 .\n", max_size=300),
)


@given(TEXTS)
def test_a_text_is_never_fewer_tokens(text: str) -> None:
    assert EXTENT is not None
    assert EXTENT.least_tokens(text) <= len(text_model().encode(text))


def test_the_longest_tokens_are_counted_as_they_are() -> None:
    assert EXTENT is not None
    word = max((t for t in backend_tokenizer().get_vocab() if t.isascii() and t.isalpha()), key=len)
    assert EXTENT.least_tokens(word * 100) >= 50


def test_composed_characters_are_counted_composed() -> None:
    extent = TokenExtent(most=(1, 1, 2), composes=True)
    assert extent.least_tokens("e\u0301" * 10) == 10


def definition(**changed: Any) -> str:
    return json.dumps({**json.loads(backend_tokenizer().to_str()), **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "1": 1, ".": 2}, "unk_token": "<unk>", "fuse_unk": True}},
        {"added_tokens": [{"id": 0, "content": "<|user|>", "rstrip": True}]},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_nothing_is_known_where_text_may_be_lost(changed: dict[str, Any]) -> None:
    assert extent_of(definition(**changed)) is None


def test_pieces_with_bytes_to_fall_back_on() -> None:
    pieces = {"<0x0A>": 0, "▁a": 1, "bcd": 2, "1": 3, "▁▁▁▁": 4, ".": 5}
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    model = {"type": "BPE", "vocab": pieces, "byte_fallback": True}
    found = extent_of(definition(model=model, normalizer=normalizer, pre_tokenizer=None, added_tokens=[]))
    assert found == TokenExtent(most=(3, 2, 4))


@pytest.mark.parametrize("num_texts", [1, 100])
def test_arguments_longer_than_the_context_are_refused_before_they_are_written(num_texts: int) -> None:
    renderer = Renderer(replace(text_model(), extent=EXTENT), RenderSettings(context=1000))
    arguments = json.dumps({"of": ["word " * (200_000 // num_texts)] * num_texts})
    call = {"id": "call0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    ask, asked = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    request = ChatRequest(messages=(ask, asked, {"role": "tool", "tool_call_id": "call0", "content": "x"}))
    with pytest.raises(ContextTooLong, match="arguments of its tool calls"):
        renderer.render(request)
    tracemalloc.start()
    try:
        with pytest.raises(ContextTooLong):
            renderer.render(request)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(arguments)
    finally:
        tracemalloc.stop()
