"""The corpus and the model that ship: project logs made from a seed, and a tiny reader trained on other logs."""
