"""Estimators: steps in, advantages out. One file each, the formula in the class docstring."""
