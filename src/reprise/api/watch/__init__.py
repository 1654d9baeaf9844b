"""What is watched: events, sums of what reuse saved, Prometheus metrics, recordings."""
