"""Clips: reading frames from files, the suites they come from, and the generated ones."""
