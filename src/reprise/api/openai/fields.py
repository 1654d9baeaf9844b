"""The fields that OpenAI's APIs share: sampling parameters, and how long a prompt's prefix is to stay cached.

The latter are documented in the types of the `openai` package, which are made from OpenAI's own specification.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from reprise.api.http.body import AnswerBound, Body
from reprise.api.service.served import Asked
from reprise.api.wire.controls import AnswerControls
from reprise.chat.grammars.tool_grammar import ALLOWED_TOOLS
from reprise.core.errors import BadRequest
from reprise.core.job import Origin, Sampling

_SEEDS = 2**63

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
ContextSize = Annotated[int, Field(ge=0, le=1_000_000)]


class SamplingFields(AnswerControls):
    """OpenAI's sampling parameters, and those that mlx-lm and llama.cpp have beside them. Null is the default."""

    adapters: str | None = None
    """mlx-lm's name for the adapter that the model is to have."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 and 0 are off."""
    min_p: Probability | None = None
    min_tokens_to_keep: Annotated[int, Field(ge=1, le=1000)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_context_size: ContextSize | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """llama.cpp's names for the two above."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: ContextSize | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: ContextSize | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    n_predict: AnswerBound | None = None
    """llama.cpp's `max_tokens`."""
    stop: str | list[str] | None = None
    stream: bool | None = None


_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "min_tokens_to_keep",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
)


def sampling_of(fields: SamplingFields, asked: Asked, *, logprobs: int | None) -> tuple[Sampling, dict[str, Origin]]:
    """The sampling of a request. `logprobs` as in `Sampling`. Raises BadRequest naming the field."""
    given: dict[str, Any] = {name: value for name in _NAMES if (value := getattr(fields, name)) is not None}
    if fields.top_k is not None:
        given["top_k"] = asked.top_k(fields.top_k)
    if fields.repeat_penalty is not None:
        given.setdefault("repetition_penalty", fields.repeat_penalty)
    if fields.repeat_last_n is not None:
        # -1 is everything so far.
        given.setdefault("repetition_context_size", fields.repeat_last_n if fields.repeat_last_n >= 0 else 1_000_000)
    if fields.seed is not None:
        given["seed"] = fields.seed % _SEEDS
    bias = _logit_bias(fields.logit_bias, asked.served.text.vocab_size)
    return asked.served.sampling.sampling(given, logit_bias=bias, logprobs=logprobs)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in (bias or {}).items():
        # Digits of other scripts are digits to Python, too.
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < vocab_size):
            raise BadRequest(
                f"`logit_bias` has the key {key[:40]!r}; keys must be token ids from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        checked[int(key)] = value
    return checked


def num_choices_of(fields: SamplingFields, asked: Asked) -> int:
    count, most = fields.n or 1, asked.limits.max_choices
    if count > most:
        raise BadRequest(f"`n` is {count}; at most {most} answers are returned.", param="n")
    return count


AllowedMode = Literal["auto", "required"]


def allowed_choice(mode: AllowedMode, tools: Sequence[Mapping[str, Any]]) -> str | Mapping[str, Any]:
    """The choice among some of the tools, of which all stay in the prompt. Only a call that is required is held to."""
    if mode == "auto":
        return "auto"
    named = (tool.get("function") if isinstance(tool.get("function"), dict) else tool for tool in tools)
    return {"type": ALLOWED_TOOLS, "names": [cast("Mapping[str, Any]", each).get("name") for each in named]}


def allowed_notes(choice: str | Mapping[str, Any], given: object) -> tuple[str, ...]:
    """What is to be said of a choice that came as `given`."""
    is_free = choice == "auto" and not isinstance(given, str | None)
    return ("`tool_choice`: the model may call any tool, not only the allowed ones",) if is_free else ()


Retention = Literal["in_memory", "in-memory", "24h"]
"""OpenAI's client libraries have spelled the first one both ways."""

_SECONDS: dict[Retention, float | None] = {"in_memory": None, "in-memory": None, "24h": 24 * 3600.0}

Ttl = Literal["30m", "12h"]
"""The shortest time that a prefix is to stay."""

_TTL_S: dict[Ttl, float] = {"30m": 1800.0, "12h": 12 * 3600.0}


class CacheOptions(Body):
    """`prompt_cache_options`. Without a `ttl` it has no effect."""

    mode: Literal["implicit", "explicit"] | None = None
    """Who says which prefixes are written: the server, or the marks in the messages alone."""
    ttl: Ttl | None = None
    prewarm: bool | None = None
    """Compute the prompt into the cache, and answer nothing: what `POST /v1/prefill` does."""


def retained_for_s(retention: Retention | None, options: CacheOptions | None = None) -> float | None:
    """For how many seconds the prefix is pinned; None: not at all, it stays cached until it is evicted.

    The two fields do not interact: if both are set, the longer time applies.
    """
    wanted = [None if retention is None else _SECONDS[retention]]
    if options is not None and options.ttl is not None and options.mode != "explicit":
        wanted.append(_TTL_S[options.ttl])
    return max((seconds for seconds in wanted if seconds is not None), default=None)


def prewarms(options: CacheOptions | None) -> bool:
    """Whether the request is to prepare the cache, and nothing else."""
    return options is not None and options.prewarm is True
