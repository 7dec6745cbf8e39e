"""References of attention."""
