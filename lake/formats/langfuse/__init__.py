"""Langfuse traces."""
