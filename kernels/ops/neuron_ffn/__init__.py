"""Kernels of FFNs in layout neuron."""
