"""The engine thread, the only one that uses models, trees and leases."""

from reprise.loop.engine_client import EngineClient

__all__ = ["EngineClient"]
