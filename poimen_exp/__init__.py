"""Trains the update and exit gates of a recurrent-memory reader as a LoRA adapter."""

__version__ = "0.1.0"
