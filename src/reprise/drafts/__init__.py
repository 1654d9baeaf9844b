"""Speculative decoding without a draft model: drafts from earlier text, and how many tokens are worth verifying."""
