"""The checks: each a pure function from the facts to what it finds. A new one is a file here and a line in `check.NAMES`."""
