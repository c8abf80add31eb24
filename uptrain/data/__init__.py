"""From texts to batches: sources → tokens → one memory-mapped cache → order of windows → batches."""
