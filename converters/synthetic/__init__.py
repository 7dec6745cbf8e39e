"""Random bundles for measurements."""
