"""Estimate how long a calibration takes, by timing its parts on the first layer. Needs torch."""
