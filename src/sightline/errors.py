"""The exception for users' errors. The command line prints it as one line; any other exception is a bug of
Sightline."""


class UserError(ValueError):
    """Says what is wrong, where, and what to do about it."""
