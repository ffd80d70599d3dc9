"""What `gpu-plugin doctor` does: looks at a node without needing a daemon, and says what is wrong and what to do."""
