"""A rendered request, and which part of it stands where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from reprise.chat.piecewise_tokenizer import TokenizedText
from reprise.chat.request import ChatRequest, Message
from reprise.chat.template import RenderContext
from reprise.core.prompt import Prompt
from reprise.core.tokens import Span


class PartKind(StrEnum):
    HEAD = "head"
    """What the template writes before the first message: a default system prompt, a date."""
    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGE = "message"
    GENERATION_PROMPT = "generation prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A part of the prompt: the characters `chars` of its text. `index` and `role` name the message, if it is one."""

    kind: PartKind
    chars: Span
    index: int | None = None
    role: str | None = None

    def __str__(self) -> str:
        return str(self.kind) if self.index is None else f"message {self.index} ({self.role})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """A request as the model reads it.

    `context` is how it was rendered, `history` the messages before they were put into the form that the template takes.
    `is_thinking_open`: the prompt ends inside thinking. `dates` are the date texts that the template was given.
    `previous` is the latest rendering known of the same chat, for explanations; it has no `previous` itself.
    """

    context: RenderContext
    history: tuple[Message, ...]
    prompt: Prompt
    text: str
    tokenized: TokenizedText
    is_thinking_open: bool
    parts: tuple[PromptPart, ...] = ()
    notes: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    previous: "Rendered | None" = None

    @property
    def request(self) -> ChatRequest:
        """What was rendered, with the reasoning that was put back."""
        return self.context.request

    def part_at_char(self, char: int) -> PromptPart | None:
        """The smallest part that holds this character."""
        holding = [part for part in self.parts if part.chars.start <= char < part.chars.stop]
        return min(holding, key=lambda part: len(part.chars), default=None)

    def char_at(self, position: int, decode: Callable[[Sequence[int]], str]) -> int:
        """Where in `text` the token at `position` begins. Decodes at most the one piece that holds it."""
        piece = self.tokenized.piece_of_token(position)
        if piece is None:
            return len(self.text)
        before = piece.tokens[: position - piece.token_at].tolist()
        # An unfinished character decodes to a replacement: it begins where that stands.
        return piece.char_at + min(len(piece.text), len(decode(before).rstrip("\ufffd")) if before else 0)

    def token_at(self, char: int, decode: Callable[[Sequence[int]], str]) -> int:
        """The first token that begins at or behind this character. Decodes within one piece, O(log) times."""
        piece = self.tokenized.piece_of_char(char)
        if piece is None:
            return len(self.prompt)
        low, high = 0, len(piece.tokens)
        while low < high:
            middle = (low + high) // 2
            if self.char_at(piece.token_at + middle, decode) < char:
                low = middle + 1
            else:
                high = middle
        return piece.token_at + low

    def tokens_of(self, part: PromptPart, decode: Callable[[Sequence[int]], str]) -> Span:
        """The tokens that begin within the part."""
        start = self.token_at(part.chars.start, decode)
        return Span(start, max(start, self.token_at(part.chars.stop, decode)))
