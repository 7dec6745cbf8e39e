"""One file per architecture, named as Hugging Face's `model_type`: what its config means, and its forward pass."""
