"""The vocabulary in which architectures write their forward pass."""
