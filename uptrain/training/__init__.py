"""Training: the loop, models, losses, the optimizer and evaluation."""
