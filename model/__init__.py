"""The model on disk and in memory: the ground floor both `convert` and `uptrain` stand on."""
