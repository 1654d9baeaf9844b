"""Which token may come next: structured output and forced calls, compiled within limits."""
