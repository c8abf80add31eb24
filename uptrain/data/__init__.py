"""Training data: sources, the memory-mapped token cache, the order of windows, and batches."""
