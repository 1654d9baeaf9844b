"""Drafts: which tokens will probably come next, from everything that was said before, and how many are worth a pass."""
