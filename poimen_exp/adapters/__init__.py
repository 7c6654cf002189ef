"""Adapters: export, manifest, mount check, registry, serving, merging."""
