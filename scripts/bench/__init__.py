"""Benchmarks: converting, training and decoding, measured against their peers. Figures: docs/benchmarks.md."""
