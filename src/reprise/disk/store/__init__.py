"""A model's records by key: index, reading, writing, eviction and what other servers change."""
