"""The engine thread, the only one that uses models, trees and leases."""

from reprise.loop.engine_loop import EngineLoop

__all__ = ["EngineLoop"]
