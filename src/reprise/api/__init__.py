"""HTTP: OpenAI, Anthropic, streaming, errors, metrics."""
