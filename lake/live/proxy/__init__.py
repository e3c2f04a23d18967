"""The recording proxy: forwards model calls to an engine or vendor, and records each as a step."""
