"""Text models made by the tests: a small byte-level BPE tokenizer and the chat templates of `templates/`.

Import it from anywhere in the tests: ``from tests.chat.text_models import text_model``. No MLX, nothing downloaded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.text_model import TextModel

TEMPLATES = Path(__file__).parent / "templates"

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_CORPUS = (
    "You are a helpful assistant. Answer briefly and say what you do not know.",
    "What is the weather in Paris today? It is sunny and about twenty degrees, with a light wind from the west.",
    "Let me think about this step by step. First, the user asks for the weather, so I call the tool with the city.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    '{"type": "function", "function": {"name": "search", "description": "Search the web", "parameters": {}}}',
    "system\nuser\nassistant\ntool\nassistant\nuser\n",
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n\n",
    "Thank you. And what about tomorrow? Tomorrow it will rain in the morning, and in the evening it clears up.\n",
)


@cache
def backend_tokenizer(*, vocab_size: int = 600) -> Tokenizer:
    """A byte-level BPE tokenizer: any text survives `encode` and `decode`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


@dataclass
class PlainDetokenizer:
    """Decodes the tokens since the last whole character and gives what is new, holding back unfinished characters."""

    tokenizer: PreTrainedTokenizerFast
    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    is_final: bool = False

    def add_token(self, token: int) -> None:
        self.tokens.append(token)

    def finalize(self) -> None:
        self.is_final = True

    @property
    def last_segment(self) -> str:
        text = self.tokenizer.decode(self.tokens)
        if self.is_final or not text.endswith("\ufffd"):
            segment = text[self.seen :]
            self.tokens, self.seen = [], 0
            return segment
        text = text.rstrip("\ufffd")
        segment, self.seen = text[self.seen :], max(self.seen, len(text))
        return segment


def template_source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def template_names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def _parse_json_call(text: str, _tools: Any) -> Any:
    return json.loads(text.strip())


@cache
def fast_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend_tokenizer().to_str()),
        eos_token="<|im_end|>",
        chat_template=None if template is None else template_source(template),
        clean_up_tokenization_spaces=False,
    )


@cache
def text_model(template: str | None = "strips_thinking") -> TextModel:
    """The text side of a model with the template of this name (see `template_names`); None: without a template."""
    return make_text_model(fast_tokenizer(template))


def make_text_model(tokenizer: PreTrainedTokenizerFast) -> TextModel:
    """A TextModel of any fast tokenizer: thinking in `<think>`, tool calls as JSON in `<tool_call>`."""
    vocab = tokenizer.get_vocab()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=False)

    def render(messages: Sequence[Any], **options: Any) -> str:
        return tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options)

    has_think = "<think>" in vocab
    model = TextModel(
        encode=encode,
        decode=decode,
        render=None if tokenizer.chat_template is None else render,
        detokenizer=lambda: PlainDetokenizer(tokenizer),
        splitters={token.content: number for number, token in tokenizer.added_tokens_decoder.items()},
        eos=frozenset() if tokenizer.eos_token_id is None else frozenset({tokenizer.eos_token_id}),
        vocab_size=len(vocab),
        template_source=tokenizer.chat_template or "",
        think_start="<think>" if has_think else None,
        think_end="</think>" if has_think else None,
        think_start_tokens=(vocab["<think>"],) if has_think else (),
        think_end_tokens=(vocab["</think>"],) if has_think else (),
        tool_start="<tool_call>" if has_think else None,
        tool_end="</tool_call>" if has_think else None,
        parse_tool_call=_parse_json_call,
    )
    return replace(model, calls=learn_calls(model))
