"""Commands of the repository, which run `convert` and `uptrain`. The packages do not import them."""
