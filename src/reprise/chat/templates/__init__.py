"""Chat templates: rendering, how they treat earlier turns, and text to tokens piece by piece."""
