"""Layer states, live and as payloads: kinds, batches of sequences, and restoring them."""
