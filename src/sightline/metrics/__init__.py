"""What predictions are worth: the predictions table, group metrics, intervals, localisation, overlap, key points, cost."""
