"""Benchmarks of converting, training and decoding against their peers. The results are in docs/benchmarks.md."""
