"""Training: the loop, losses, the optimizer and evaluation."""
