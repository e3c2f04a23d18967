"""What is trained on, and in which form it reaches the loss: selection, plan, pairs, packing, the stream of batches."""
