"""The recording proxy: passes calls of a model on to an engine or a vendor, and records each as a step."""
