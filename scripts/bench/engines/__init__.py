"""Engines that serve models, each in its own environment: the workers there, and the client that asks them."""
