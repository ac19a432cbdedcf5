"""Converts tables of original values to checked numpy arrays, and those to the arrays of a batch."""
