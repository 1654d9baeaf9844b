"""Trains the demo's model: its tokenizer, a PyTorch twin of it, the training loop, the export and the evaluation."""
