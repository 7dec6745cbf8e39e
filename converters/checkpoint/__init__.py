"""Checkpoints of Hugging Face: their files, tensors and names."""
