"""Jobs over tables: collect rollouts, score them, give credit, select, evaluate.

Imports the lake and no other layer; torch and transformers are imported inside the functions that need them.
"""
