"""The model in memory: a native Llama decoder, its losses, loading and generation, and a wrapper of transformers."""
