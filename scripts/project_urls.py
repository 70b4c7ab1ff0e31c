"""The package's addresses: those of the repository whose workflow builds it.

``hatchling`` calls it, see ``pyproject.toml``. Elsewhere a build has none.
"""

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        repository = os.environ.get("GITHUB_REPOSITORY")
        if repository:
            server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
            pages = {
                "Repository": "",
                "Documentation": "/tree/main/docs",
                "Changelog": "/blob/main/CHANGELOG.md",
                "Issues": "/issues",
            }
            address = f"{server}/{repository}"
            metadata["urls"] = {name: address + path for name, path in pages.items()}
