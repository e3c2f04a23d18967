"""The trained model: loading, scoring in packed buffers, adapters, export."""
