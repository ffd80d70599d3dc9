"""Keeps the CDI specifications of the node written: finds out what they should say, writes them, and says when they hold."""
