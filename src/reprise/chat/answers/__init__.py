"""From tokens to answers: reasoning, content, tool calls and stop strings."""
