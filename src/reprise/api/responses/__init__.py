"""OpenAI's responses API at the edge: items in, internal requests; internal events, items and events out."""
