"""Methods: a *where*, a *what*, and how they are put together."""
