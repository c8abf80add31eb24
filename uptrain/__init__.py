"""Continue the pre-training of a converted checkpoint until its quality is back."""
