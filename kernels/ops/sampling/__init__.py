"""Kernels of sampling."""
