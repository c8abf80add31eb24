"""Write the output: shards, `config.json`, `groupwise.json` and the model card."""
