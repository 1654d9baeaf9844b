"""Limits that keep one client from blocking the others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a single request may ask for, and how long the API waits before it says that it is still there."""

    max_depth: int = 100
    """Levels of lists and objects in a body."""
    max_containers: int = 65_536
    """Lists and objects in a body."""
    max_commas: int = 100_000
    """What else a body lists, beside two token ids for each token of the context."""
    max_messages: int = 10_000
    max_tools: int = 512
    max_stops: int = 16
    max_choices: int = 16
    """`n`, and what of one completions request is computed at the same time."""
    max_completions: int = 1_024
    """Answers of one completions request: its prompts, times `n`."""
    max_top_logprobs: int = 20
    max_unread: int = 16_384
    """Events of one request that wait for a client that does not read; beyond it the request is cancelled."""
    max_records: int = 1_000
    """Requests whose records are kept."""
    keep_alive_s: float = 5.0
    """A stream that was silent for so long sends a comment."""
    grammar_wait_s: float = 30.0
    """A request waits for so long until its grammar is compiled."""
