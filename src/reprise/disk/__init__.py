"""The disk tier: keeps cached prefixes across restarts in a size-limited directory."""
