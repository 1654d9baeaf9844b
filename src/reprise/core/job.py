"""Jobs for the engine thread, one sequence each, and the sampling parameters that a request leaves to the server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from reprise.core.prompt import Prompt
from reprise.core.tokens import Tokens


class Purpose(StrEnum):
    GENERATE = "generate"
    PREFILL = "prefill"
    """Compute and store the prompt without sampling (warm-up, prefill while typing)."""
    SETTLE = "settle"
    """Like PREFILL, but only while the engine is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters, with the meaning they have in mlx-lm.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0, `min_p` 0 are off. `repetition_penalty` 1 is off.
    `seed` None: random. `logprobs` None: none; k: of the chosen token and of the k likeliest.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a model thinks, in tokens.

    `budget` None: no limit; n: `end` is forced after n reasoning tokens. `is_open`: the prompt ends inside thinking,
    since the template wrote `start` into the generation prompt.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    budget: int | None = None
    is_open: bool = False


class ThinkingTracker:
    """Tracks whether a sequence is inside thinking, and counts its thinking tokens."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._tail: tuple[int, ...] = ()
        """The last tokens since thinking began or ended, as many as `end` or `start` has."""
        self.is_open = thinking.is_open
        self.num_tokens = 0

    def saw(self, token: int) -> None:
        """Record the next token of the sequence. Thinking can begin again after it has ended."""
        self.num_tokens += int(self.is_open)
        run = self._thinking.end if self.is_open else self._thinking.start
        if len(run) == 0:
            return
        self._tail = (*self._tail, token)[-len(run) :]
        if self._tail == run:
            self.is_open, self._tail = not self.is_open, ()


class Constraint(Protocol):
    """A grammar that restricts the next token of one sequence. Used on the engine thread only."""

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        """A bit mask over the vocabulary, 32 tokens per word, lowest bit first; None: no restriction.

        It stays as it is until a token is accepted.
        """
        ...

    def accept(self, token: int) -> None:
        """Record that the token was chosen. Raises ValueError if the grammar does not allow it."""
        ...


@runtime_checkable
class ForcingConstraint(Constraint, Protocol):
    """A grammar that also knows where it determines the text: keys, names and markup."""

    def forced(self) -> Sequence[int]:
        """The usual tokens of that text, starting with the next one; other tokenizations may be allowed too."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedChat:
    """A chat that will not go on, by the first and the last of its jobs."""

    first_job: str
    last_job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What a request tells of other chats of its sender, by the ids of their jobs. Unknown ids have no effect.

    `ended`: sub-agents that had ended when it came. `awaited`: the latest jobs of the agents that wait for this one,
    nearest first. `is_side`: it belongs to no chat (a title, a quota check).
    """

    ended: tuple[EndedChat, ...] = ()
    awaited: tuple[str, ...] = ()
    is_side: bool = False


NO_LINEAGE = Lineage()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One sequence to compute.

    The engine prefills `prompt` from the best position that the cache has, then samples up to `max_tokens` tokens
    (0 for PREFILL and SETTLE) until one of `stop_tokens` or until `watch`, called on the engine thread with each
    sampled token, returns True. Before `min_tokens` none of `stop_tokens` is sampled, unless the grammar allows nothing
    else. `constraint` makes the grammar of this sequence.
    """

    id: str
    prompt: Prompt
    purpose: Purpose = Purpose.GENERATE
    namespace: str = ""
    owner: str = ""
    """The owner of the pins it sets: the namespace itself, or one of those who share it."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    thinking: Thinking | None = None
    watch: Callable[[int], bool] | None = None
    constraint: Callable[[], Constraint] | None = None
    chat: str | None = None
    """The client's name for the conversation (`prompt_cache_key`, or session and agent), if any."""
    lineage: Lineage = NO_LINEAGE
    follows: str | None = None
    """Of SETTLE: the id of the request whose next turn this is."""
    calls_tool: bool | None = None
    """Of SETTLE: whether the answer to that request ends with a tool call."""
    beside: str | None = None
    """Of SETTLE: the job that starts what begins like this. While it decodes and nothing else is there, this may run,
    too."""
    pin_for_s: float | None = None
    """How long EXPLICIT boundaries stay pinned, from when each is stored; infinity: until they are unpinned."""
    prompt_logprobs: int | None = None
    """k: also give log-probabilities of the prompt's tokens, with the k likeliest at each position (`Scored` events).

    They need the logits, which the cache does not keep, so nothing of the prompt is reused."""
    prediction: Tokens | None = None
    """The client's predicted output, from which drafts are made."""
    retain_for_s: float | None = None
    """How long what the next turn can reuse stays pinned, or until that turn is pinned instead."""

    def __post_init__(self) -> None:
        assert len(self.prompt) > 0, "an empty prompt is refused before it becomes a job"
        assert (self.max_tokens > 0) == (self.purpose is Purpose.GENERATE), self.max_tokens
        assert 0 <= self.min_tokens <= self.max_tokens, (self.min_tokens, self.max_tokens)
        assert self.prompt_logprobs is None or self.prompt_logprobs >= 0, self.prompt_logprobs
        assert self.pin_for_s is None or self.pin_for_s > 0, self.pin_for_s
        assert self.retain_for_s is None or self.retain_for_s > 0, self.retain_for_s


Number = int | float


class Origin(StrEnum):
    """Where a parameter comes from."""

    REQUEST = "request"
    FLAG = "flag"
    """An option of the command line."""
    GENERATION_CONFIG = "generation_config"
    """The model's own `generation_config.json`."""
    DEFAULT = "default"


REPORTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that a model or the command line can set; the record always reports them."""

_REPETITION_CONTEXT = 8192
"""The context of a `repetition_penalty` in `generation_config.json`, which has no limit of its own."""


_LEAST_TOP_P = 1e-6
"""What 0 stands for: it keeps only the likeliest token, as does its neighbourhood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults for requests, by the field names of `Sampling`; `by_flag` overrides `by_model`."""

    by_flag: Mapping[str, Number] = field(default_factory=dict[str, Number])
    by_model: Mapping[str, Number] = field(default_factory=dict[str, Number])

    def sampling(
        self, given: Mapping[str, Any], *, logit_bias: Mapping[int, float] | None = None, logprobs: int | None = None
    ) -> tuple[Sampling, dict[str, Origin]]:
        """The sampling of a request with the parameters `given` (None: not set), and their origins by name."""
        said = {name: value for name, value in given.items() if value is not None}
        values: dict[str, Any] = {**self.by_model, **self.by_flag, **said}
        if values.get("top_p") == 0:
            values["top_p"] = _LEAST_TOP_P
        origins = {
            name: Origin.REQUEST
            if name in said
            else Origin.FLAG
            if name in self.by_flag
            else Origin.GENERATION_CONFIG
            if name in self.by_model
            else Origin.DEFAULT
            for name in dict.fromkeys((*REPORTED, *values))
        }
        return Sampling(**values, logit_bias=dict(logit_bias or {}), logprobs=logprobs), origins


def read_generation_config(config: Mapping[str, Any], *, vocab_size: int) -> dict[str, Number]:
    """The sampling of a `generation_config.json`, by the field names of `Sampling`, without values out of range.

    `do_sample: false` is greedy, as in transformers, which defines the format.
    """
    ranges: dict[str, tuple[float, float]] = {
        "temperature": (0, 100),
        "top_p": (1e-9, 1),
        "top_k": (0, vocab_size),
        "min_p": (0, 1),
        "repetition_penalty": (1e-9, 100),
    }
    found: dict[str, Number] = {}
    for name, (low, high) in ranges.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name == "top_k" else float(value)
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("repetition_penalty", 1) != 1:
        found["repetition_context_size"] = _REPETITION_CONTEXT
    return found
