"""Quality of a model's predictions of a text, and the gate for approximations."""
