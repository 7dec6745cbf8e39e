"""Activations of a model that runs: hooks behind its operations, statistics over a text."""
