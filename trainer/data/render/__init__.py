"""Text-only episodes as token rows, by the model's chat template."""
