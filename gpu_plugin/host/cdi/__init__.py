"""Keeps the CDI specifications of the node up to date: builds them, writes them, and reports which devices they serve."""
