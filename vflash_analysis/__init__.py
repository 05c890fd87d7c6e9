"""VFlash-FM reproduction suite. Importing the package loads neither torch nor decord."""

__version__ = "0.1.0"
