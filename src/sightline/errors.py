"""The exception for users' errors. The command line prints it as one line; any other exception is a bug of
Sightline."""

LONGEST = 1600  # characters: a damaged file may have a name or a cell of any length


class UserError(ValueError):
    """Says what is wrong, where, and what to do about it."""

    def __init__(self, message: str):
        text = str(message)
        if len(text) > LONGEST:
            text = f"{text[: LONGEST - 400]} … {text[-390:]}"
        super().__init__(text)
