"""Hold a layer's attention in float64, round it once, and store its converted tensors: what merging and MLA share."""
