"""Replays traces of prompts against the real store, planner and policies, with payloads of given sizes and no model."""

from enum import StrEnum


class Granularity(StrEnum):
    """What one token of a replayed block trace stands for."""

    TOKEN = "token"
    BLOCK = "block"
    """One token for a block: the same hits, since prompts part at blocks alone; sizes are rounded up to blocks."""
