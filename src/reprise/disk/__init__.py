"""The disk tier: what the prefix cache would lose with the process, in a bounded directory."""
