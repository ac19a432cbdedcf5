"""Reader processes and the shared memory through which they hand over batches."""
