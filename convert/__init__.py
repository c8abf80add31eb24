"""Convert a checkpoint's attention, file to file: merge or repeat K/V heads, or replace them by a latent."""
