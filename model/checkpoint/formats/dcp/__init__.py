"""Reader of torch.distributed.checkpoint folders: Hugging Face's, torchtitan's and OLMo-core's tensor names."""
