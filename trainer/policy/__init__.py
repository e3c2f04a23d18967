"""The model that is trained: loading, scoring in packed buffers, adapters, export."""
