"""What a server is told when it starts: every option of `reprise serve`, read by the loop and the API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reprise.core.sizes import Amount, Bytes

DISK_BYTES = Bytes(20 * 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of one server. The defaults are those of the command line."""

    model: str
    """A local directory or a hub id."""
    host: str = "127.0.0.1"
    port: int = 8080
    """0: any free port."""
    log_level: str = "info"
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    separates_keys: bool = False
    """Give each API key a prefix cache namespace of its own."""
    accepts_any_model: bool = False
    """Serve requests that name another model, instead of refusing them."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the server; empty: none."""
    max_body_bytes: int | None = None
    """A longer request body is refused; None: what a prompt that fits the context may need."""
    max_connections: int = 1024
    """At the same time; fewer where the system gives fewer file descriptors."""
    request_timeout_s: float = 30.0
    """For a request to arrive whole: a connection that is silent for so long is closed."""
    read_timeout_s: float = 60.0
    """For a client to read: an answer that waits for so long is cancelled."""
    grace_s: float = 30.0
    """For stopping: what has not ended by then is ended."""

    max_tokens: int | None = None
    """Default for requests that don't set it; None: what the context leaves."""
    temperature: float | None = None
    """Default for requests that don't set it, instead of the model's own; so are the next three."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    chat_template: str | None = None
    """Jinja source instead of the model's own template."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Template options for requests that don't set them."""
    thinking_budget: int | None = None
    """Reasoning tokens for requests that do not say; None: no bound."""
    max_context: int | None = None
    """Prompt plus answer, in tokens; None: what the model's configuration says."""
    kv_bits: int | None = None
    """Quantise KV to so many bits; None: not at all."""
    kv_group_size: int = 64

    has_prefix_cache: bool = True
    cache_bytes: Amount | None = None
    """For the prefix cache and the live state of running requests together; None: derived from the device."""
    disk_directory: str | None = None
    """Where prefixes are kept on disk as well; None: nowhere."""
    disk_bytes: Amount = DISK_BYTES
    """For all that is in that directory; a share is one of the disk's size."""
    warm_file: str | None = None
    """A file of prompts to compute when the server starts (`reprise.api.warm`)."""
    settles: bool = True
    """Compute the next turn's known prefix while the server is idle."""
    max_settle: int = 16384
    """Tokens that one settle computes at most, but for the rest of a prefill chunk."""

    canonical_tokens: bool = False
    """Tokenize answers that come back as history afresh, instead of reusing the tokens that were sampled."""
    restore_reasoning: bool = False
    """Put reasoning that a client dropped back into the chat."""
    normalizes: bool = True
    """Leave out of system prompts what changes with every request and means nothing to the model."""
    stable_tools: bool = False
    """Sort the tools of a request by name."""
    freeze_template_date: bool = False
    """Keep the day of a chat's first request in templates that write the date."""

    max_queue: int = 64
    """Requests that may wait; one more is refused."""
    max_batch: int = 8
    """Sequences that decode together."""
    prefill_chunk: int = 2048
    """Tokens of one prefill step when nobody else is decoding."""
    max_stall_ms: int = 100
    """The gap between two tokens of a running answer that a prefill chunk should not exceed."""

    def __post_init__(self) -> None:
        assert 0 <= self.port <= 65535, self.port
        assert self.max_body_bytes is None or self.max_body_bytes > 0, self.max_body_bytes
        assert self.max_connections > 0, self.max_connections
        assert min(self.request_timeout_s, self.read_timeout_s, self.grace_s) > 0, self
        assert self.max_tokens is None or self.max_tokens > 0, self.max_tokens
        assert self.temperature is None or self.temperature >= 0, self.temperature
        assert self.top_p is None or 0 < self.top_p <= 1, self.top_p
        assert self.top_k is None or self.top_k >= 0, self.top_k
        assert self.min_p is None or 0 <= self.min_p <= 1, self.min_p
        assert self.thinking_budget is None or self.thinking_budget >= 0, self.thinking_budget
        assert self.max_context is None or self.max_context > 0, self.max_context
        assert self.kv_bits is None or self.kv_bits in KV_BITS, self.kv_bits
        assert self.kv_group_size in KV_GROUP_SIZES, self.kv_group_size
        assert min(self.max_queue, self.max_batch, self.prefill_chunk, self.max_stall_ms) > 0, self
        assert self.max_settle > 0, self.max_settle


KV_BITS = (2, 3, 4, 5, 6, 8)
"""What `mx.quantize` offers."""
KV_GROUP_SIZES = (32, 64, 128)
LOG_LEVELS = ("debug", "info", "warning", "error")
