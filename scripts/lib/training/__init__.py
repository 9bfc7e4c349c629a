"""Trains a drafter on stored target states: rows, batches, unrolled drafting, loss, evaluation, checkpoints, the loop."""
