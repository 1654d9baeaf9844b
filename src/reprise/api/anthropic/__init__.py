"""Anthropic's messages API at the edge: bodies in, internal requests; internal events, bodies and events out."""
