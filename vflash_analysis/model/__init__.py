"""The frozen target, the drafter, their cache and their attention."""
