"""One file per architecture, named as Hugging Face's `model_type`: its config, and its forward pass."""
