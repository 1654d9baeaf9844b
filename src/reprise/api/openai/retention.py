"""How long OpenAI's clients want a prompt's prefix to stay: `prompt_cache_retention` and `prompt_cache_options`.

What the fields mean is said in the types of the `openai` package, which are made from OpenAI's own specification.
"""

from typing import Literal

from reprise.api.body import Body

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
