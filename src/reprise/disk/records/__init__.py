"""Records, the unit of storage on disk: their keys and their format."""
