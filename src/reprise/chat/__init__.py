"""Messages to tokens and boundaries; tokens to text, reasoning and tool calls."""
