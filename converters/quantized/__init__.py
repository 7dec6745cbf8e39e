"""Quantised checkpoints of Hugging Face: codes are kept if a storage type holds them."""
