"""Shared infrastructure of all ops: dispatch, registration, launches, tensor descriptors, device facts,
autograd pieces."""
