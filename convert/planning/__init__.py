"""Decide what a conversion will do, from the checkpoint's headers and the options."""
