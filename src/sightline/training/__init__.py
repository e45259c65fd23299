"""Everything the one training loop in train.py needs: batches, optimiser and schedule, EMA, checkpoint, run folder,
processes, trackers."""
