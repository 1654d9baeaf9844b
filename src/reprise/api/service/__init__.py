"""The service behind all APIs: one internal request in, a reply with its events out, and its record."""
