"""Everything that touches MLX: models, layer states, batches, sampling."""
