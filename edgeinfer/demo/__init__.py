"""The embedded demo model: fables-5m-relu as a q4 bundle; data, licence and measurements are in bundle/README.md."""
