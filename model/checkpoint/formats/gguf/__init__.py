"""Reader of GGUF files of Llama architecture."""
