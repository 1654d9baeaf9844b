"""`reprise serve MODEL`: its options are the fields of `Settings`, one for one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from reprise.cli.options import (
    above_zero,
    amount,
    check_kv_bits,
    check_kv_group_size,
    num_bytes,
    one_of,
    some,
    template_options,
    template_source,
)
from reprise.cli.refuse import refusals, refuse
from reprise.core.settings import KV_BITS, KV_GROUP_SIZES, LOG_LEVELS, Settings

_SERVER = "Server"
_ANSWERS = "Answers"
_REUSE = "Reuse"
_LOAD = "Load"


def _check_log_level(value: str) -> str:
    one_of(value, LOG_LEVELS)
    return value


def serve(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local model directory or a hub id.")],
    host: Annotated[str, Option(help="The address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="0 picks a free one and prints it.", rich_help_panel=_SERVER)
    ] = 8080,
    log_level: Annotated[
        str,
        Option(help=f"One of {', '.join(LOG_LEVELS)}.", callback=_check_log_level, rich_help_panel=_SERVER),
    ] = "info",
    api_key: Annotated[
        list[str] | None,
        Option(help="A key that requests have to bring. May be given several times.", rich_help_panel=_SERVER),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="A file with one key in each line.", rich_help_panel=_SERVER),
    ] = None,
    key_namespaces: Annotated[
        bool, Option("--key-namespaces", help="Keys share no prefix with each other.", rich_help_panel=_SERVER)
    ] = False,
    any_model: Annotated[
        bool, Option("--any-model", help="Serve requests that name another model.", rich_help_panel=_SERVER)
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        Option(help="A web origin that may call the server. May be given several times.", rich_help_panel=_SERVER),
    ] = None,
    max_body: Annotated[
        str | None,
        Option(
            metavar="BYTES",
            help="The longest request body, as 32MiB. Default: follows from the context window.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_connections: Annotated[
        int, Option(min=1, help="Connections at the same time; idle ones make room.", rich_help_panel=_SERVER)
    ] = 1024,
    request_timeout: Annotated[
        float,
        Option(
            min=0.1, metavar="SECONDS", help="Close connections that send no whole request.", rich_help_panel=_SERVER
        ),
    ] = 30.0,
    read_timeout: Annotated[
        float,
        Option(min=0.1, metavar="SECONDS", help="Cancel answers that nobody reads.", rich_help_panel=_SERVER),
    ] = 60.0,
    grace: Annotated[
        float,
        Option(
            min=0.1,
            metavar="SECONDS",
            help="For answers under way and disk writes, when the server is stopped.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0,
    max_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="The longest answer to requests that don't set it; without it, what the context leaves.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    temp: Annotated[
        float | None,
        Option(
            min=0,
            max=100,
            help="Temperature for requests that don't set it; without it, the model's own. So are the next three.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(
            help="Sample from the likeliest tokens that have this share.",
            callback=above_zero,
            max=1,
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    top_k: Annotated[
        int | None, Option(min=0, help="Sample from so many likeliest tokens; 0: from all.", rich_help_panel=_ANSWERS)
    ] = None,
    min_p: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="Leave out tokens less likely than this share of the likeliest.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        Option(
            metavar="TEMPLATE",
            help="A Jinja chat template instead of the model's own: a file, or the template itself.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    chat_template_args: Annotated[
        str | None,
        Option(
            metavar="JSON",
            help="Template options for requests that don't set them, as '{\"enable_thinking\": false}'.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    thinking_budget: Annotated[
        int | None,
        Option(min=0, help="Reasoning tokens at most, for requests that do not say.", rich_help_panel=_ANSWERS),
    ] = None,
    max_context: Annotated[
        int | None, Option(min=1, help="Prompt and answer together, in tokens.", rich_help_panel=_ANSWERS)
    ] = None,
    no_prefix_cache: Annotated[
        bool, Option("--no-prefix-cache", help="Compute every prompt from its start.", rich_help_panel=_REUSE)
    ] = False,
    cache_bytes: Annotated[
        str | None,
        Option(
            metavar="AMOUNT",
            help="Memory for the cache and running requests, as 8GB or 25%; else what the device can spare.",
            rich_help_panel=_REUSE,
        ),
    ] = None,
    disk_cache: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            file_okay=False,
            help="Keep prefixes in this directory, too: a restart finds them again.",
            rich_help_panel=_REUSE,
        ),
    ] = None,
    disk_bytes: Annotated[
        str, Option(metavar="AMOUNT", help="For --disk-cache, as 20GB or 5% of the disk.", rich_help_panel=_REUSE)
    ] = "20GB",
    warm: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Prompts to compute at the start: a system prompt as text, or bodies of /v1/prefill as JSON lines.",
            rich_help_panel=_REUSE,
        ),
    ] = None,
    no_settle: Annotated[
        bool,
        Option("--no-settle", help="Do not read ahead for the next turn while idle.", rich_help_panel=_REUSE),
    ] = False,
    max_settle: Annotated[
        int, Option(min=1, help="Tokens that are read ahead after one answer, at most.", rich_help_panel=_REUSE)
    ] = 16384,
    canonical_tokens: Annotated[
        bool,
        Option("--canonical-tokens", help="Tokenize answers in the history afresh.", rich_help_panel=_REUSE),
    ] = False,
    restore_reasoning: Annotated[
        bool,
        Option("--restore-reasoning", help="Put back reasoning that a client dropped.", rich_help_panel=_REUSE),
    ] = False,
    no_normalize: Annotated[
        bool,
        Option(
            "--no-normalize", help="Leave values that change with every request in the prompt.", rich_help_panel=_REUSE
        ),
    ] = False,
    stable_tools: Annotated[
        bool, Option("--stable-tools", help="Sort the tools of a request by name.", rich_help_panel=_REUSE)
    ] = False,
    freeze_template_date: Annotated[
        bool,
        Option("--freeze-template-date", help="A chat keeps the day of its first request.", rich_help_panel=_REUSE),
    ] = False,
    kv_bits: Annotated[
        int | None,
        Option(
            help=f"Quantise KV to {', '.join(map(str, KV_BITS))} bits.", callback=check_kv_bits, rich_help_panel=_REUSE
        ),
    ] = None,
    kv_group_size: Annotated[
        int,
        Option(help=f"{', '.join(map(str, KV_GROUP_SIZES))}.", callback=check_kv_group_size, rich_help_panel=_REUSE),
    ] = 64,
    max_queue: Annotated[int, Option(min=1, help="Requests that may wait.", rich_help_panel=_LOAD)] = 64,
    max_batch: Annotated[int, Option(min=1, help="Sequences that decode together.", rich_help_panel=_LOAD)] = 8,
    prefill_chunk: Annotated[int, Option(min=1, help="Tokens of one prefill step.", rich_help_panel=_LOAD)] = 2048,
    max_stall_ms: Annotated[
        int, Option(min=1, help="The longest gap in a running answer to aim for.", rich_help_panel=_LOAD)
    ] = 100,
) -> None:
    """Serve a model over HTTP, with the OpenAI API among others."""
    keys = _keys_of(api_key or (), api_key_file)
    settings = Settings(
        model=model,
        host=host,
        port=port,
        log_level=log_level,
        api_keys=keys,
        separates_keys=key_namespaces,
        accepts_any_model=any_model,
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=num_bytes("--max-body", max_body) if max_body is not None else None,
        max_connections=max_connections,
        request_timeout_s=request_timeout,
        read_timeout_s=read_timeout,
        grace_s=grace,
        max_tokens=max_tokens,
        temperature=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        chat_template=template_source("--chat-template", chat_template) if chat_template is not None else None,
        chat_template_args=(
            template_options("--chat-template-args", chat_template_args) if chat_template_args is not None else {}
        ),
        thinking_budget=thinking_budget,
        max_context=max_context,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        has_prefix_cache=not no_prefix_cache,
        cache_bytes=some("--cache-bytes", cache_bytes) if cache_bytes is not None else None,
        disk_directory=str(disk_cache) if disk_cache is not None else None,
        disk_bytes=amount("--disk-bytes", disk_bytes),
        warm_file=str(warm) if warm is not None else None,
        settles=not no_settle,
        max_settle=max_settle,
        canonical_tokens=canonical_tokens,
        restore_reasoning=restore_reasoning,
        normalizes=not no_normalize,
        stable_tools=stable_tools,
        freeze_template_date=freeze_template_date,
        max_queue=max_queue,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        max_stall_ms=max_stall_ms,
    )
    from reprise.cli.assemble import run_server  # noqa: PLC0415 (imports MLX)

    with refusals():
        run_server(settings)


def _keys_of(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    # An empty variable of a shell script must not open the server to everybody.
    if any(not key.strip() for key in given):
        refuse("--api-key is empty. Give a key, or leave the option out to serve without keys.")
    if file is None:
        return tuple(given)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"{file} cannot be read as text: {error}.")
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        refuse(f"{file} contains no key. Write one key per line.")
    return (*given, *keys)
