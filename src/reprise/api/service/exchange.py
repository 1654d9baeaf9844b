"""The types between the APIs and the service: one internal request, one internal event stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reprise.api.service.caller import UNKNOWN, Caller
from reprise.api.service.replay import PromptBlocks
from reprise.chat.answer import Answer, Delta
from reprise.chat.grammars.grammar import Grammar
from reprise.chat.reasons.explain import Explanation
from reprise.chat.request import ChatRequest
from reprise.core.events import Sampled
from reprise.core.job import REPORTED, Origin, Sampling
from reprise.core.outcome import Outcome
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawPrompt:
    """Text or tokens that the model continues as they are, without a chat template."""

    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServiceRequest:
    """One request, through any API.

    `prompt` is a chat to render or a raw prompt. `num_choices` answers are sampled from it. `max_tokens` None: the
    server's default, or what the context leaves; what does not fit is cut (`EndReason.LENGTH`). `stops` end the content
    (not the reasoning) before the string. `tool_choice` is OpenAI's (`"auto"`, `"none"`, `"required"` or a named
    function).
    """

    id: str
    api: str
    """The API's name in records: `chat`, `completions`, `messages`, `responses`, `ollama`."""
    prompt: ChatRequest | RawPrompt
    sampling: Sampling = field(default_factory=Sampling)
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    """Who chose the parameters of `sampling`, by name."""
    num_choices: int = 1
    max_tokens: int | None = None
    generates: bool = True
    """If not, the prompt is computed into the cache, and nothing is sampled."""
    until: BoundaryKind | None = None
    """Use only the part of the prompt before its last boundary of this kind."""
    prompt_logprobs: int | None = None
    """As in `Job`: of the first answer's prompt, which is that of all."""
    min_tokens: int = 0
    """The fewest tokens of the answer."""
    ignores_eos: bool = False
    """The model cannot end its answer: `max_tokens`, `stops` and `stop_tokens` do."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer beside the model's own."""
    stops: tuple[str, ...] = ()
    thinking_budget: int | None = None
    """Reasoning tokens; None: the server's default."""
    tool_choice: str | Mapping[str, Any] = "auto"
    streams_calls: bool = False
    """The client hears tool calls as they are written. If not, a call that turns out malformed is its text alone."""
    allows_parallel_calls: bool = True
    """If not, the answer ends with its first tool call."""
    grammar: Grammar | None = None
    """What the answer must look like."""
    namespace: str = ""
    """The namespace of the caller's API key, see `ChatService.cache_namespace`."""
    response_id: str | None = None
    """The id that the client knows, where one response joins several requests."""
    prediction: str = ""
    """What the client says the answer will be much like."""
    chat: str | None = None
    """A name for the conversation, where the client gives one."""
    caller: Caller = UNKNOWN
    """Which agent sends it, where the client says so."""
    pin_for_s: float | None = None
    """Keep the positions at `ChatRequest.breakpoints` in the cache for so long."""
    next_chat: Callable[[Answer], ChatRequest] | None = None
    """What follows the answer in the chat, up to the user's next words; None: with the answer."""
    retain_for_s: float | None = None
    """Keep what the next turn can use of the prompt in the cache for so long, or until that turn asks for the same."""
    notes: tuple[str, ...] = ()
    """For the record: fields that were ignored, and the like."""

    @property
    def chat_name(self) -> str | None:
        """Session and agent, or the name that the client gives the conversation; None if it gives neither."""
        return self.caller.name or self.chat


class EndReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request, all its choices together; the prompt counts once.

    `num_prompt` = `num_cached` + what was prefilled before the first choice began; `num_stored` were newly put into
    the cache.
    """

    num_prompt: int
    num_cached: int = 0
    num_stored: int = 0
    num_completion: int = 0
    num_reasoning: int = 0
    num_accepted: int = 0
    """Of `num_completion`, tokens that were drafted; `num_rejected`: drafted tokens that turned out wrong."""
    num_rejected: int = 0

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A choice's prefill begins at `num_cached` of `num_prompt` tokens."""

    choice: int
    num_cached: int
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StillWaiting:
    """Nothing has come for a while. `position` of `total` prompt tokens are computed; both 0 while in the queue.

    `choice` is the first one of the request that waits.
    """

    position: int
    total: int
    choice: int = 0

    @property
    def text(self) -> str:
        """How far it is, in words for a comment in a stream."""
        return f"prefill {self.position}/{self.total}" if self.total > 0 else "queued"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerDelta:
    """A piece of the answer number `choice`. `tokens`: what was sampled since the last one, if logprobs are wanted.

    `prompt`: the next tokens of the prompt, from token 1 on, if their log-probabilities are wanted.
    """

    choice: int
    deltas: tuple[Delta, ...]
    tokens: tuple[Sampled, ...] = ()
    prompt: tuple[Sampled, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerEnd:
    """The answer number `choice` is complete. `stop`: the stop string that ended it, where one did."""

    choice: int
    reason: EndReason
    answer: Answer
    outcome: Outcome
    stop: str | None = None


ReplyEvent = Began | StillWaiting | AnswerDelta | AnswerEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """One parameter."""

    value: float | int
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedImage:
    """An image of a prompt, without its file: it stands in `span`, and `digest` begins as that of the file does."""

    width: int
    height: int
    digest: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One request that is over. `created` in Unix seconds; `outcomes` has one entry for each choice that began."""

    id: str
    api: str
    model: str
    created: float
    namespace: str
    ended: str
    """`stop`, `length`, `tool_calls`, `cancelled`, `failed`, or `refused` before it began."""
    outcomes: tuple[Outcome, ...]
    error: str | None = None
    status: int | None = None
    """The HTTP status of a request that was refused."""
    chat: str | None = None
    """A name for the conversation: session and agent, or what the client calls it."""
    caller: Caller = UNKNOWN
    explanation: Explanation | None = None
    """Where the prompt diverged from the cache, and why."""
    notes: tuple[str, ...] = ()
    used: Mapping[str, Used] = field(default_factory=dict[str, Used])
    """The sampling parameters and who chose them."""
    render_s: float = 0.0
    """From its arrival at the API to the engine's queue."""
    images: tuple[RecordedImage, ...] = ()
    blocks: PromptBlocks | None = None
    """Its prompt as hashes, to replay it against other budgets; None for one that was refused."""


def used_of(request: ServiceRequest, *, max_tokens: int, has_flag: bool) -> dict[str, Used]:
    """The parameters of a request by name. `max_tokens` is what it may write; `has_flag`: the server has a bound."""
    names = dict.fromkeys((*REPORTED, *request.origins))
    used = {
        name: Used(value=getattr(request.sampling, name), origin=request.origins.get(name, Origin.DEFAULT))
        for name in names
    }
    unsaid = Origin.FLAG if has_flag else Origin.DEFAULT
    origin = unsaid if request.max_tokens is None else Origin.REQUEST
    return used | {"max_tokens": Used(value=max_tokens, origin=origin)}
