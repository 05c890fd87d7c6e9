"""The one exception that stands for bad input: its message is a single line a user can act on."""


class InputError(ValueError):
    """Bad input: the message names the file or setting, what was found and what is allowed."""
