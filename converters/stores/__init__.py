"""Models of other programs on this machine, and in folders."""
