"""Tiny models with random weights, in the form that mlx-lm loads: for the demonstration and for tests."""
