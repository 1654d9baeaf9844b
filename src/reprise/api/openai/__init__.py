"""OpenAI's APIs at the edge: bodies in, internal requests; internal events, bodies and chunks out."""
