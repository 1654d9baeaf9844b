"""Pure scheduling: which requests run next, and which chunks they prefill."""
