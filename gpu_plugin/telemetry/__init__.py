"""What operators see of the running daemon."""
