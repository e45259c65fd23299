"""Where to look: selectors, which turn images into a `Sight`. Nothing here imports `what`."""
