"""Run a model by our own decoder or by its class in transformers: layer by layer, or token by token. Needs torch."""
