"""Budget of a run: the number of steps from α, the learning rate schedule, the table of originals, and estimates."""
