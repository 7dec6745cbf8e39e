"""Weights in memory: loaded at the start, streamed, or read when a token needs them."""
