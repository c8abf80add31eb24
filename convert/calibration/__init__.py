"""Run a model layer by layer on a text, and fit or measure what replaces its attention. Needs torch."""
