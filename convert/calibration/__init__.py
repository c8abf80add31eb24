"""Fit what replaces the attention of each layer, on a calibration text that runs through the model. Needs torch."""
