"""Lossless greedy decoding: one loop, one tree, one file per method family."""
