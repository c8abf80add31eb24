"""Check that OUT can be written; write shards, `groupwise.json` and the model card."""
