"""Reprise: prefix reuse for MLX language models."""

__version__ = "0.1.0"
