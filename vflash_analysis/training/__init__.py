"""Target continuations, block-drafter objectives, and the training and evaluation loops."""
