"""`prompt_cache_retention`: how long OpenAI's clients want a prompt's prefix to stay."""

from typing import Literal

Retention = Literal["in_memory", "in-memory", "24h"]
"""OpenAI's client libraries have spelled the first one both ways."""

_SECONDS: dict[Retention, float | None] = {"in_memory": None, "in-memory": None, "24h": 24 * 3600.0}


def retained_for_s(retention: Retention | None) -> float | None:
    """For how many seconds the prefix is pinned; None: not at all, it stays for as long as it is worth its memory."""
    return None if retention is None else _SECONDS[retention]
