"""The prefix cache: a radix tree over token sequences, with segments and snapshots as opaque payloads."""
