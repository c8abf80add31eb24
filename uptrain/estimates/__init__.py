"""Estimates of the memory and time of a run from file headers, and the plan that shows them."""
