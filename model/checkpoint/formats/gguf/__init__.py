"""Reader of GGUF files of Llama and Qwen 2 architecture."""
