"""Configs of Hugging Face checkpoints: typed, bounded reading."""
