"""Ollama's API at the edge, for front ends that speak only that: each request is a chat completion in other words."""
