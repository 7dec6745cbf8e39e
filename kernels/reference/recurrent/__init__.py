"""References of recurrent layers."""
