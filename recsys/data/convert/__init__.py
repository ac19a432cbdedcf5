"""From tables of original values to checked numpy arrays."""
