"""What the calibration text is made of: texts written for it, and generators."""
