"""Kernels of recurrent layers: causal convolution, delta rule and selective scan, gated norm."""
