"""What is trained on, and what is not and why: selection, sequences, mixtures, preference pairs, refusals."""
