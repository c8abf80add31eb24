"""Hold the materials of the calibration text: texts written for it, and generators."""
