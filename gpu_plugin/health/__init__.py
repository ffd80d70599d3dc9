"""What a GPU's signals mean: evidence in, health out. Pure: the clock is an argument."""
