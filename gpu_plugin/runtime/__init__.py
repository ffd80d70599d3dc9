"""What every part runs on: threads, wakening, supervision and back-off, files read and replaced. Knows nothing of GPUs."""
