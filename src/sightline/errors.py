"""What goes wrong on the user's side. The command line prints these as one line; anything else is our own mistake."""


class UserError(ValueError):
    """Says what is wrong, where, and what to do about it."""
