"""The options of a server, each declared here once.

Command line, environment, configuration file, `reprise config` and docs/options.md follow from the annotations
(`cli/configuration.py`). An option is named after its field unless it says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, get_type_hints

from reprise.core.options import (
    AMOUNT,
    AMOUNT_OR_ZERO,
    AUTO,
    DIRECTORY,
    FILE,
    FOUND_DIRECTORY,
    HOST_NAMES,
    MODEL,
    NAMED_DIRECTORIES,
    NBYTES,
    OFF,
    SWITCH,
    TABLE,
    TEMPLATE,
    TEXT,
    TEXTS,
    WRITTEN_FILE,
    ModelTables,
    Option,
    OptionGroup,
    OptionKind,
    number,
    one_of,
)
from reprise.core.sizes import Amount, Bytes

KV_BITS = (2, 3, 4, 5, 6, 8)
"""The widths that `mx.quantize` supports."""
KV_GROUP_SIZES = (32, 64, 128)
DISK_BYTES = Bytes(20 * 10**9)
DISK_DAILY_WRITES = Bytes(150 * 10**9)
"""Ten years of it are less than what an SSD of a terabyte is made for."""
NEVER, ALWAYS = "never", "always"
BACKGROUND_MODES = (AUTO, NEVER, ALWAYS)
"""When next turns are settled, answers audited, and prefixes written to disk."""
DRAFTS_EXACT, DRAFTS_ALWAYS = "exact", "always"
DRAFT_MODES = (AUTO, OFF, DRAFTS_EXACT, DRAFTS_ALWAYS)
IMAGES = ("auto", "off")
EMBEDDERS = ("auto", "off", "cls", "mean", "last", "yes-no")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

_COUNT = number(least=1)
# At most eleven days: no socket waits for longer than twenty-four.
_SECONDS = number(is_whole=False, least=0.1, most=10**6, metavar="SECONDS")


def _option(group: OptionGroup, kind: OptionKind, text: str, *, name: str = "", is_secret: bool = False) -> Option:
    return Option(name=name, group=group, help=text, kind=kind, is_secret=is_secret)


_server, _answers, _reuse, _load = (partial(_option, group) for group in OptionGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of one server, with their defaults. None: not set."""

    model: Annotated[str, _server(MODEL, "A local model directory, a Hugging Face repository id, or an alias.")]
    models: Annotated[
        Mapping[str, Mapping[str, Any]],
        _server(
            ModelTables(options=lambda: MODEL_OPTIONS, others=lambda: [each.name for each in OPTIONS.values()]).kind(),
            "Models by alias, each with its own options. In the file: tables such as `[models.fast]`.",
        ),
    ] = field(default_factory=dict[str, Mapping[str, Any]])
    other_models: Annotated[
        tuple[str, ...],
        _server(
            TEXTS,
            "Also serve this model, loaded when a request names it. Repeat the option, or pass several MODELs.",
            name="with-model",
        ),
    ] = ()
    models_dir: Annotated[
        str | None,
        _server(DIRECTORY, "Also serve every model directory below this one, each loaded when a request names it."),
    ] = None
    has_hub_cache: Annotated[
        bool,
        _server(
            SWITCH, "Also serve the models in the hub's cache, each loaded when a request names it.", name="hub-cache"
        ),
    ] = False
    adapters: Annotated[
        Mapping[str, str],
        _server(
            NAMED_DIRECTORIES,
            "Also serve the model with this adapter, for requests that name it. Repeat the option to serve several.",
            name="adapter",
        ),
    ] = field(default_factory=dict[str, str])
    preloads: Annotated[
        bool, _server(SWITCH, "Load every model at startup if it fits, instead of on first use.", name="preload")
    ] = False
    is_pinned: Annotated[
        bool, _server(SWITCH, "Never unload a loaded model, even if other models need its memory.", name="pin")
    ] = False
    downloads: Annotated[
        bool,
        _server(
            SWITCH,
            "Let a request download the model that it names. Models loaded at startup are always downloaded.",
            name="download",
        ),
    ] = False
    keep_alive_s: Annotated[
        float | None,
        _server(
            _SECONDS,
            "Unload a model's weights after this long without a request. If not set, when others need the memory.",
            name="keep-alive",
        ),
    ] = None
    host: Annotated[str, _server(TEXT, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, _server(number(least=0, most=65535), "Port to listen on. 0 picks a free port and prints it.")
    ] = 8080
    allowed_hosts: Annotated[
        tuple[str, ...],
        _server(
            HOST_NAMES,
            "Also answer requests to this host name, such as a gateway's; * for any. IP addresses, localhost and the "
            "name in --host are always answered. Repeat the option to allow several.",
            name="allowed-host",
        ),
    ] = ()
    log_level: Annotated[str, _server(one_of(*LOG_LEVELS), f"Log level: {', '.join(LOG_LEVELS)}.")] = "info"
    log_format: Annotated[
        str, _server(one_of(*LOG_FORMATS), "Log as text, or as a JSON object per line: text, json.")
    ] = "text"
    log_file: Annotated[
        str | None,
        _server(
            WRITTEN_FILE,
            "Log to this file instead of standard error. At 10 MB it becomes FILE.1; three old files are kept.",
        ),
    ] = None
    is_quiet: Annotated[
        bool,
        _server(SWITCH, "Log only warnings and errors: no banner, no progress, no line per request.", name="quiet"),
    ] = False
    api_keys: Annotated[
        tuple[str, ...],
        _server(TEXTS, "Require this API key. Repeat the option to accept several.", name="api-key", is_secret=True),
    ] = ()
    api_key_file: Annotated[str | None, _server(FILE, "File of API keys, one per line.")] = None
    separates_keys: Annotated[
        bool, _server(SWITCH, "Give each API key a separate prefix cache.", name="key-namespaces")
    ] = False
    accepts_any_model: Annotated[
        bool, _server(SWITCH, "Accept requests for any model name instead of refusing unknown ones.", name="any-model")
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        _server(TEXTS, "Allow web pages from this origin. Repeat the option to allow several.", name="cors-origin"),
    ] = ()
    max_body_bytes: Annotated[
        int | None,
        _server(NBYTES, "Largest request body, such as 32MiB. Derived from the context if not set.", name="max-body"),
    ] = None
    max_images: Annotated[int, _server(_COUNT, "Most images in one chat.")] = 100
    max_image_bytes: Annotated[int, _server(NBYTES, "Largest image file, such as 20MB.")] = 20_000_000
    max_image_pixels: Annotated[int, _server(_COUNT, "Most pixels of an image, width times height.")] = 50_000_000
    image_hosts: Annotated[
        tuple[str, ...],
        _server(
            HOST_NAMES,
            "Fetch images whose URL names this host, if its address is public. Without it, images come as data alone. "
            "Repeat the option to allow several.",
            name="allow-image-urls",
        ),
    ] = ()
    max_connections: Annotated[
        int, _server(_COUNT, "Most open connections. Idle ones are closed to make room for new ones.")
    ] = 1024
    request_timeout_s: Annotated[
        float,
        _server(_SECONDS, "Close a connection that takes longer than this to send a request.", name="request-timeout"),
    ] = 30.0
    read_timeout_s: Annotated[
        float, _server(_SECONDS, "Cancel an answer that the client hasn't read for this long.", name="read-timeout")
    ] = 60.0
    background_s: Annotated[
        float,
        _server(
            _SECONDS,
            "How long a background answer keeps running, and is kept after it ends, while no client reads it.",
            name="background-time",
        ),
    ] = 600.0
    background_nbytes: Annotated[
        int,
        _server(
            NBYTES,
            "Most memory for background answers. Finished ones are dropped first, then the largest is cancelled.",
            name="background-bytes",
        ),
    ] = 64 * 2**20
    stall_after_s: Annotated[
        float,
        _server(
            _SECONDS,
            "Report the engine as stalled, in the log and at /health, when it makes no progress for this long.",
            name="stall-after",
        ),
    ] = 120.0
    is_tensor_parallel: Annotated[
        bool,
        _server(
            SWITCH,
            "Split the model over the ranks of `mlx.launch -n N --backend ring`. Pass this option to every rank.",
            name="tensor-parallel",
        ),
    ] = False
    grace_s: Annotated[
        float, _server(_SECONDS, "On shutdown, time for running answers and disk writes to finish.", name="grace")
    ] = 30.0
    record_file: Annotated[
        str | None,
        _server(
            WRITTEN_FILE,
            "Append each request to this file: times, lengths and prompt hashes, with --record-text also its body. "
            "For `reprise simulate` and `reprise bench --replay`.",
            name="record",
        ),
    ] = None

    max_tokens: Annotated[
        int | None,
        _answers(
            _COUNT,
            "Longest answer, in tokens. Default for requests that don't set it; if not set, what the context leaves.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _answers(
            number(is_whole=False, least=0, most=100),
            "Sampling temperature. Default for requests that don't set it; if not set, the model's own.",
            name="temp",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _answers(
            number(is_whole=False, above=0, most=1),
            "Sample from the smallest set of likely tokens with this total probability. Default as for --temp.",
        ),
    ] = None
    top_k: Annotated[
        int | None, _answers(number(least=0), "Sample from the K likeliest tokens; 0: from all. Default as for --temp.")
    ] = None
    min_p: Annotated[
        float | None,
        _answers(
            number(is_whole=False, least=0, most=1),
            "Drop tokens less likely than this fraction of the likeliest. Default as for --temp.",
        ),
    ] = None
    embedder: Annotated[
        str,
        _answers(
            one_of(*EMBEDDERS),
            "Whether the model makes embeddings instead of text: auto as its files say, off, or a pooling (cls, mean, "
            "last) where they do not say it. yes-no: a reranker whose answer is yes or no.",
        ),
    ] = "auto"
    images: Annotated[
        str,
        _answers(
            one_of(*IMAGES),
            "auto: load a model that can see so that it does, if the extra `vision` is installed. off: for text alone.",
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, _answers(TEMPLATE, "Jinja template, or a file with one, to use instead of the model's.")
    ] = None
    learnt: Annotated[
        str | None,
        _answers(
            FILE,
            "TOML that says what thinking, content and tool calls stand between, instead of what is learnt from the "
            "template; `reprise inspect MODEL --learnt` prints one. If not set, reprise-learnt.toml beside the model.",
        ),
    ] = None
    chat_template_args: Annotated[
        Mapping[str, Any],
        _answers(
            TABLE,
            "Template variables, such as '{\"enable_thinking\": false}'. Default for requests that don't set them.",
        ),
    ] = field(default_factory=dict[str, Any])
    thinking_budget: Annotated[
        int | None,
        _answers(number(least=0), "Most reasoning tokens per answer. Default for requests that don't set it."),
    ] = None
    max_context: Annotated[
        int | None, _answers(_COUNT, "Prompt and answer together, in tokens. If not set, the model's context length.")
    ] = None

    has_prefix_cache: Annotated[
        bool,
        _reuse(SWITCH, "Reuse prefixes. Without it every prompt is prefilled from the start.", name="prefix-cache"),
    ] = True
    cache_bytes: Annotated[
        Amount | None,
        _reuse(
            AMOUNT,
            "Memory for the prefix cache and running requests, such as 8GB or 25%. Derived from the device if not set.",
        ),
    ] = None
    memory: Annotated[
        Amount | None,
        _reuse(
            AMOUNT,
            "Limit for the whole process (weights, cache, Python), such as 12GB or 50% of the machine. "
            "On CUDA this includes the device memory that MLX reports. No limit if not set.",
        ),
    ] = None
    disk_directory: Annotated[
        str | None,
        _reuse(
            DIRECTORY,
            "Keep prefixes in this directory too, so they survive a restart; or in an object store, such as "
            "s3://bucket/prefix; off: in memory alone. `reprise serve` uses the platform's cache directory if not set.",
            name="disk-cache",
        ),
    ] = None
    disk_bytes: Annotated[
        Amount,
        _reuse(
            AMOUNT_OR_ZERO,
            "Space for --disk-cache, such as 50GB or 5% of the disk. In the platform's cache directory it is at most a "
            "tenth of what is free.",
        ),
    ] = DISK_BYTES
    disk_daily_writes: Annotated[
        Amount,
        _reuse(
            AMOUNT_OR_ZERO,
            "Most bytes to write to the directory of --disk-cache in a day, to spare an SSD; 0: no limit.",
        ),
    ] = DISK_DAILY_WRITES
    warm_file: Annotated[
        str | None,
        _reuse(FILE, "Prefill at startup: a system prompt as text, or /v1/prefill bodies as JSON lines.", name="warm"),
    ] = None
    settles: Annotated[
        bool, _reuse(SWITCH, "Prefill what is known of the next turn while the server is idle.", name="settle")
    ] = True
    max_settle: Annotated[int, _reuse(_COUNT, "Most tokens to prefill ahead after one answer.")] = 16384
    canonical_tokens: Annotated[
        bool, _reuse(SWITCH, "Re-tokenize past answers instead of reusing their sampled tokens.")
    ] = False
    restore_reasoning: Annotated[bool, _reuse(SWITCH, "Put back reasoning that a client dropped from the history.")] = (
        False
    )
    normalizes: Annotated[
        bool,
        _reuse(
            SWITCH,
            "Strip billing headers and the like, which change on every request, from system prompts.",
            name="normalize",
        ),
    ] = True
    stable_tools: Annotated[
        bool, _reuse(SWITCH, "Sort tools by name, for clients that send them in varying order.")
    ] = False
    freeze_template_date: Annotated[
        bool, _reuse(SWITCH, "Keep the date of a chat's first request, for templates that print it.")
    ] = False
    audit_rate: Annotated[
        float,
        _reuse(
            number(is_whole=False, least=0, most=1, metavar="RATE"),
            "Share of answers to recompute without the cache while idle, to check that reuse changes nothing.",
            name="audit",
        ),
    ] = 0.01
    is_audit_off: Annotated[bool, _reuse(SWITCH, "Don't recompute answers while idle.", name="no-audit")] = False
    records_text: Annotated[
        bool,
        _reuse(
            SWITCH,
            "Allow prompts and answers in files and in the log, such as those of --record and an audit's error.",
            name="record-text",
        ),
    ] = False
    kv_bits: Annotated[
        int | None,
        _reuse(number(choices=KV_BITS), f"Quantize KV to {', '.join(map(str, KV_BITS))} bits (approximate)."),
    ] = None
    kv_group_size: Annotated[
        int,
        _reuse(number(choices=KV_GROUP_SIZES), f"Group size of quantized KV: {', '.join(map(str, KV_GROUP_SIZES))}."),
    ] = 64

    trusts_remote_code: Annotated[
        bool,
        _load(
            SWITCH, "Run Python code that comes with a tokenizer. Only for models you trust.", name="trust-remote-code"
        ),
    ] = False
    adapter_path: Annotated[
        str | None, _load(DIRECTORY, "Directory of an adapter for the model, as written by mlx_lm.lora.")
    ] = None
    max_queue: Annotated[
        int, _load(_COUNT, "Most requests that may wait; further ones are refused with status 429.")
    ] = 64
    max_batch: Annotated[int, _load(_COUNT, "Most sequences to decode together.")] = 8
    drafts: Annotated[
        str,
        _load(
            one_of(*DRAFT_MODES),
            "auto, off, exact or always. Draft answers from earlier text, or by a head or a draft model, and verify "
            "several tokens per pass. auto: in passes of the sizes that choose the same tokens as single steps, which "
            "is tried on this device after the start; exact: only if their logits are equal to the last bit; always: "
            "in all, though a choice between two tokens that are as likely may then depend on the size.",
        ),
    ] = AUTO
    mtp: Annotated[
        str,
        _load(
            FOUND_DIRECTORY,
            "The model's head that guesses next tokens (MTP): auto takes it from the model's files where they have "
            "one, a directory has it in place of them. A model with a head drafts unless --drafts off.",
        ),
    ] = AUTO
    draft_model: Annotated[
        str | None,
        _load(
            MODEL,
            "A small model with the same tokenizer, to draft answers in place of a head. It runs beside the model, "
            "and its state is cached with it. A local directory or a Hugging Face repository id.",
        ),
    ] = None
    background: Annotated[
        str,
        _load(
            one_of(*BACKGROUND_MODES),
            "When to do what nobody waits for (settling, auditing, disk writes): auto (not on a low "
            "battery, in low-power mode or when the machine is hot), never, always.",
        ),
    ] = AUTO
    prefill_chunk: Annotated[int, _load(_COUNT, "Tokens per prefill step while no answer is being decoded.")] = 2048
    max_stall_ms: Annotated[
        int, _load(number(least=1, metavar="MS"), "Longest gap between two tokens of an answer to aim for.")
    ] = 100

    @property
    def head_source(self) -> str:
        """Where the model's head is: `mtp`, or "off" where nothing is drafted, or by another model."""
        return "off" if self.drafts == "off" or self.draft_model is not None else self.mtp

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            fault = None if value is None else option.kind.fault(value)
            assert fault is None, f"{name} {fault}"


def _declared() -> dict[str, Option]:
    hints = get_type_hints(Settings, include_extras=True)
    declared: dict[str, Option] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    options = {name: replace(each, name=each.name or name.replace("_", "-")) for name, each in declared.items()}
    assert len({option.name for option in options.values()}) == len(options)
    return options


OPTIONS: Mapping[str, Option] = _declared()
"""The option of each field of Settings."""

MODEL_OPTIONS: Mapping[str, Option] = {
    option.name: option
    for name, option in OPTIONS.items()
    if option.group is OptionGroup.ANSWERS
    or name
    in (
        "model",
        "adapter_path",
        "adapters",
        "kv_bits",
        "kv_group_size",
        "mtp",
        "draft_model",
        "keep_alive_s",
        "preloads",
        "is_pinned",
        "downloads",
        "restore_reasoning",
        "freeze_template_date",
        "canonical_tokens",
        "trusts_remote_code",
    )
}
"""The options that a table of `models` can set, by name."""


def settings_of(settings: Settings, alias: str) -> Settings:
    """The settings of one of `models`: those of its table, and for the rest those of all models.

    Outside of a table, the options in `ONE_MODEL` are those of the first model, `settings.model`.
    """
    fields = {option.name: name for name, option in OPTIONS.items()}
    table = {fields[name]: value for name, value in settings.models[alias].items()}
    own = {name: getattr(settings, name) for name in ONE_MODEL} if alias == settings.model else ONE_MODEL
    return replace(settings, models={}, **{**own, **table})


ONE_MODEL: Mapping[str, Any] = {
    "adapter_path": None,
    "adapters": {},
    "chat_template": None,
    "learnt": None,
    "draft_model": None,
}
"""Options of single models: outside of a table they apply to the first model."""

_OF_SERVERS = ("warm_file", "memory")
"""`memory` limits the whole process, which may belong to another program."""
ENGINE_OPTIONS: Mapping[str, Option] = {
    name: option
    for name, option in OPTIONS.items()
    if option.group is not OptionGroup.SERVER and name not in _OF_SERVERS
}
"""The options that do not concern HTTP or the process."""
