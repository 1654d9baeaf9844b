"""The one engine thread: sole owner of model, tree and leases."""

from reprise.loop.engine_loop import EngineLoop

__all__ = ["EngineLoop"]
