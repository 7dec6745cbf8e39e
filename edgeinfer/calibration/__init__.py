"""Activations of a model that runs: hooks after its operations, statistics over a text."""
