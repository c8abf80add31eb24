"""Budget of a run: the number of steps from α, the table of pre-trainings, and what a conversion recorded."""
