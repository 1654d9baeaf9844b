"""The prefix cache: a radix tree over token runs, with segments and snapshots as opaque payloads."""
