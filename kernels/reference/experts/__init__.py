"""References of mixtures of experts."""
