"""Check a converted folder against its source: recompute, and compare."""
