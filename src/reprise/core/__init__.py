"""Tokens, spans, layer kinds, jobs, events, errors: the words that all other packages share. Imports nothing else."""
