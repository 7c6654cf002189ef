"""Base models as Hugging Face folders, made without a model hub."""
