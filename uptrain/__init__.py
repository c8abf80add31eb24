"""Continue the pre-training of a converted checkpoint to restore its quality."""
