"""Running a model: sequences in, tokens out; sampling, scores, cold runs, and records of its states."""
