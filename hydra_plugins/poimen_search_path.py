"""Adds verl's own configuration groups to Hydra's search path."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class PoimenSearchPath(SearchPathPlugin):
    """Hydra imports every module here at each start: what is heavy stays inside the method."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends ``verl/trainer/config`` by file path (``pkg://verl...`` would import verl: eight seconds)."""
        from poimen_exp.config.paths import register_resolvers, verl_config_dir

        register_resolvers()
        search_path.append("verl", f"file://{verl_config_dir()}")
