"""Commands of the repository. They run `convert` and `uptrain`, and nothing imports them."""
