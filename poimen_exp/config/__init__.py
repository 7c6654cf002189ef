"""The composed configuration: where it comes from, which keys it may have, and what our own keys mean."""

from poimen_exp.config.quick import quicken

quicken()
