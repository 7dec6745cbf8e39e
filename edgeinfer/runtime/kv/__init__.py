"""The KV cache of sequences: planes, blocks, prompt caches."""
