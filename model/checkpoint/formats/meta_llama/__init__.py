"""Reader of Meta's Llama format: `consolidated.NN.pth` and `params.json`."""
