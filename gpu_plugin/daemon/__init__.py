"""The process: what composes it, what it tells of itself, and what an operator asks of it."""
