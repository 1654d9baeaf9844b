"""Plants bugs, one at a time, and sees whether a test turns red: `python -m tools.mutants`."""
