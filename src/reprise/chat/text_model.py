"""The text side of a loaded model, as plain callables: everything that `chat` needs to know about a tokenizer.

The engine's loader makes one from mlx-lm's `TokenizerWrapper`; tests make one from a small tokenizer. Nothing
here imports MLX.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reprise.chat.call_format import ModelCalls
from reprise.chat.extent import TokenExtent
from reprise.core.errors import prompt_too_long
from reprise.core.images import ImageReader


class Detokenizer(Protocol):
    """Streaming detokenizer with the interface of mlx-lm's: it returns whole characters."""

    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...
    @property
    def last_segment(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Tokenizer, chat template and markup of one model. Safe to use from several threads.

    `encode` adds no special tokens and recognises the special tokens that stand in the text. `decode` keeps special
    tokens in the text. `render` is the chat template: it takes `messages` and, by keyword, `tools`, `documents`,
    `add_generation_prompt`, `continue_final_message` and any template option, and gives text; what the template
    raises passes through. `None` for `render`: the model has no chat template. `template_source` is the template's
    Jinja source, and then `render` takes another source as `chat_template`; it is empty where the template is no Jinja.

    `splitters` are the token texts at which the tokenizer splits its input before anything else (special and added
    tokens), by text. `think_*` and `tool_*` are None where the model has no such markup. `parse_tool_call` takes the
    text between `tool_start` and `tool_end` and the tools of the request, and gives one call (`{"name", "arguments"}`,
    perhaps `"id"`) or a list of them, or raises.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    render: Callable[..., str] | None
    detokenizer: Callable[[], Detokenizer]
    splitters: Mapping[str, int]
    eos: frozenset[int]
    bos: int | None = None
    vocab_size: int = 0
    template_source: str = ""
    think_start: str | None = None
    think_end: str | None = None
    think_start_tokens: tuple[int, ...] = ()
    think_end_tokens: tuple[int, ...] = ()
    tool_start: str | None = None
    tool_end: str | None = None
    parse_tool_call: Callable[[str, Any], Any] | None = None
    calls: ModelCalls = field(default_factory=ModelCalls)
    """The format of tool calls, as `call_learning` finds it."""
    structural_markers: tuple[str, ...] = ()
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict[str, Sequence[tuple[str, str]]])
    """Channel markup (`mlx_lm.chat_templates.*.RESPONSE_FORMAT["transitions"]`): state → (marker, next state)."""
    initial_state: str | None = None
    tokenizer_json: Callable[[], str] | None = None
    """Gives the definition of a fast tokenizer (`tokenizer.json`, as the tokenizer stands, without padding and
    truncation), for grammars; None: there is none."""
    extent: TokenExtent | None = None
    """How much text a token can stand for; None: nothing is known of that."""
    adds_bos: bool = False
    """The tokenizer puts `bos` before a plain text. Chat templates write it themselves."""
    images: ImageReader | None = None
    """The image side of a model that sees; None: it does not, or its template has no place for images."""

    def with_thinking(self, start: str | None, end: str | None) -> "TextModel":
        """The model with these marks around its thinking; None: it does not think."""
        start_tokens, end_tokens = (() if mark is None else tuple(self.encode(mark)) for mark in (start, end))
        return replace(
            self, think_start=start, think_end=end, think_start_tokens=start_tokens, think_end_tokens=end_tokens
        )

    def opens_thinking(self, text: str) -> bool:
        """Whether a text ends inside thinking."""
        start, end = self.think_start, self.think_end
        return start is not None and end is not None and text.rfind(start) > text.rfind(end)

    def ends_thinking(self, text: str) -> bool:
        """Whether thinking has ended in a text, as templates write it where the model is not to think."""
        return self.think_end is not None and self.think_end in text and not self.opens_thinking(text)


def refuse_if_too_long(text: str, text_model: TextModel, *, context: int | None, param: str = "messages") -> None:
    """Raise ContextTooLong for a prompt whose text alone shows that it is longer than the context."""
    # A character has four bytes at most, and a token one at least.
    if context is None or text_model.extent is None or 4 * len(text) <= context:
        return
    least = text_model.extent.least_tokens(text)
    if least > context:
        note = f" It has {len(text)} characters and was not tokenized; the token count is a lower bound."
        raise prompt_too_long(least, context, note=note, param=param)


def refuse_if_parts_too_long(texts: Iterable[str], text_model: TextModel, *, context: int | None) -> None:
    """The same for a prompt that is not rendered yet, and has all of these texts one day."""
    if context is None or text_model.extent is None:
        return
    # A token may reach over each end of a text.
    least = sum(max(0, text_model.extent.least_tokens(text) - 2) for text in texts)
    if least > context:
        note = " The count is a lower bound, from the arguments of its tool calls alone."
        raise prompt_too_long(least, context, note=note)
