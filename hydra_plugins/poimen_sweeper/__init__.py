"""The sweeper ``poimen`` for Hydra (``hydra/sweeper=poimen``)."""
