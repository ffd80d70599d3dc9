"""What every part runs on: threads, wakening, supervision, files replaced whole. Knows nothing of GPUs."""
