"""References of FFNs in layout neuron."""
