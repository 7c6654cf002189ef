"""Evaluation that can disappoint: the adapter beside the prompted base, between readers that bound the scale."""
