"""Code that converted folders carry, for families whose class in transformers has no number of K/V heads.

A file here is copied unchanged, and `config.json` names it under `auto_map`. It therefore imports only torch,
transformers and its sibling, and has to run under every version of transformers from 4.57 on.
"""
