"""Speculative decoding: drafters, and the controller of how many tokens they draft."""
