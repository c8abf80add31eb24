"""Training data: the memory-mapped token cache, the order of windows, batches, and a teacher's stored logits."""
