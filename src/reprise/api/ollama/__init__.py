"""Ollama's API at the edge, for clients that support only that: each request is translated to a chat completion."""
