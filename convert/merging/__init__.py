"""Merge K/V heads: arithmetic on weights in float64, without torch. The methods are in `methods`."""
