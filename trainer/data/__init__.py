"""Training data on its way to the loss: selection, plan, preferences, packing, and the stream of batches."""
