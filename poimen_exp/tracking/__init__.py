"""The records of a run: folder, ``metrics.jsonl``, W&B as a copy, progress, trajectories, provenance, inspection."""
