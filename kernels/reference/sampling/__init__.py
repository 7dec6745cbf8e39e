"""References of sampling."""
