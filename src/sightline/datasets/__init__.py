"""Published datasets and those built here: one reader or builder each, their shared code, and the toy set."""
