"""Reprise: prefix reuse for MLX language models.

A token that was prefilled once is never prefilled again while a user waits::

    with reprise.Engine("path-or-hub-id") as engine:
        chat = engine.chat(system="You are brief.")
        for piece in chat.stream("Hello!"):
            print(piece.text, end="")
        print(chat.last.usage.cached_tokens, chat.last.why)

`Engine` and `Chat` are the server without HTTP; `PrefixCache` is for programs that run the model themselves. Errors
that a user can meet are `RepriseError`s. Names are imported when they are first used: `import reprise` alone loads
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprise.api.service.exchange import EndReason, Record
    from reprise.cache.lookup import Match
    from reprise.cache.node import Lease, SegmentSizes
    from reprise.cache.prefix_cache import CacheStats, PrefixCache
    from reprise.chat.answer import ToolCall, ToolCallDelta
    from reprise.core.backend import Status
    from reprise.core.errors import (
        BadRequest,
        ChatBusy,
        ContextTooLong,
        DiskUnusable,
        EngineFailed,
        LoadFailed,
        OutOfMemory,
        QueueFull,
        RepriseError,
        RequestCancelled,
        ShuttingDown,
        TemplateFailed,
    )
    from reprise.core.kinds import Chunk, Full, Layout, Window
    from reprise.core.prompt import Boundary, BoundaryKind, Prompt
    from reprise.core.settings import Settings
    from reprise.core.tokens import as_tokens
    from reprise.engine.models.load import LoadedModel, load_model
    from reprise.engine.states.blueprint import Blueprint, blueprint_of
    from reprise.engine.states.restoration import restored
    from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
    from reprise.library.chat import Chat, ChatAnswer, ChatPiece, TokenUsage
    from reprise.library.engine import Engine
    from reprise.library.image import Image
    from reprise.memory import Memory
    from reprise.plan.checkpoints import Plan, make_plan

__version__ = "0.1.0"

__all__ = [
    "BadRequest",
    "Blueprint",
    "Boundary",
    "BoundaryKind",
    "CacheStats",
    "Chat",
    "ChatAnswer",
    "ChatBusy",
    "ChatPiece",
    "Chunk",
    "ContextTooLong",
    "DiskUnusable",
    "EndReason",
    "Engine",
    "EngineFailed",
    "Full",
    "Image",
    "Layout",
    "Lease",
    "LoadFailed",
    "LoadedModel",
    "Match",
    "Memory",
    "OutOfMemory",
    "Plan",
    "PrefixCache",
    "Prompt",
    "QueueFull",
    "Record",
    "RepriseError",
    "RequestCancelled",
    "SegmentSizes",
    "SequenceBatch",
    "SequenceSource",
    "Settings",
    "ShuttingDown",
    "Status",
    "TemplateFailed",
    "TokenUsage",
    "ToolCall",
    "ToolCallDelta",
    "Window",
    "__version__",
    "as_tokens",
    "blueprint_of",
    "load_model",
    "make_plan",
    "restored",
]

_HOMES = {
    "reprise.api.service.exchange": ("EndReason", "Record"),
    "reprise.cache.lookup": ("Match",),
    "reprise.cache.node": ("Lease", "SegmentSizes"),
    "reprise.cache.prefix_cache": ("CacheStats", "PrefixCache"),
    "reprise.chat.answer": ("ToolCall", "ToolCallDelta"),
    "reprise.core.backend": ("Status",),
    "reprise.core.errors": (
        "BadRequest",
        "ChatBusy",
        "ContextTooLong",
        "DiskUnusable",
        "EngineFailed",
        "LoadFailed",
        "OutOfMemory",
        "QueueFull",
        "RepriseError",
        "RequestCancelled",
        "ShuttingDown",
        "TemplateFailed",
    ),
    "reprise.core.kinds": ("Chunk", "Full", "Layout", "Window"),
    "reprise.core.prompt": ("Boundary", "BoundaryKind", "Prompt"),
    "reprise.core.settings": ("Settings",),
    "reprise.core.tokens": ("as_tokens",),
    "reprise.engine.models.load": ("LoadedModel", "load_model"),
    "reprise.engine.states.blueprint": ("Blueprint", "blueprint_of"),
    "reprise.engine.states.restoration": ("restored",),
    "reprise.engine.states.sequence_batch": ("SequenceBatch", "SequenceSource"),
    "reprise.library.chat": ("Chat", "ChatAnswer", "ChatPiece", "TokenUsage"),
    "reprise.library.engine": ("Engine",),
    "reprise.library.image": ("Image",),
    "reprise.memory": ("Memory",),
    "reprise.plan.checkpoints": ("Plan", "make_plan"),
}

if not TYPE_CHECKING:
    # Not before a type checker's eyes: it would take any name for one of ours.

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(home), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'reprise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
