"""A model's format of tool calls: learnt from its template, read, written, and its values."""
