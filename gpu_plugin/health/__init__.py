"""The health of GPUs: evidence in, verdicts out. Pure: the clock is an argument."""
