"""What it is: predictors, which see nothing but a `Sight`. Nothing here imports `where`."""
