"""The demonstration: a tiny model, the real server, and forty turns of a chat."""
