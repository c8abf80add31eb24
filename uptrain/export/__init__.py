"""Export of a run as a Hugging Face folder with a model card."""
