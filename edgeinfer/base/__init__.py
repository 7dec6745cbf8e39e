"""Helpers that every other package may import: values, files, locks, the process."""
