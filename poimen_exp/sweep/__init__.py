"""Sweeps: Hydra's overrides to Optuna trials behind the gate check, resumable folders, and the report on them."""
