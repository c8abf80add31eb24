"""Describe, read and store the text that a conversion is calibrated on. Needs no torch."""
