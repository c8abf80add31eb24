"""Budget of a run: the number of steps from α, the table of pre-trainings, and estimates of memory and time."""
