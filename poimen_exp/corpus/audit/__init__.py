"""``poimen corpus check``: everything the loader refuses, and labels that can be had without reading."""
