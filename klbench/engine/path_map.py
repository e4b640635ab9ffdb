"""Where the server and klbench see one folder under two paths: a container, a tunnel, another machine.

    paths = read_path_map(["/work=/home/a/work"])
    paths.on_server(Path("/home/a/work/traces"))      "/work/traces": what the server is told
    paths.here("/work/traces")                        Path("/home/a/work/traces"): where klbench reads

The longest mapped folder wins; a path below none of them is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from klbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class PathMap:
    """Pairs of a folder of the server's and the same folder here."""

    pairs: tuple[tuple[PurePosixPath, Path], ...] = ()

    @property
    def spelled(self) -> tuple[str, ...]:
        return tuple(f"{server}={here}" for server, here in self.pairs)

    def on_server(self, here: Path) -> str:
        """The path that the server has for one of ours."""
        found = [(own, server) for server, own in self.pairs if here.is_relative_to(own)]
        if not found:
            return str(here)
        own, server = max(found, key=lambda pair: len(pair[0].parts))
        return str(server / here.relative_to(own).as_posix())

    def here(self, server: str) -> Path:
        """Our path for one of the server's."""
        path = PurePosixPath(server)
        found = [(root, own) for root, own in self.pairs if path.is_relative_to(root)]
        if not found:
            return Path(server)
        root, own = max(found, key=lambda pair: len(pair[0].parts))
        return own / path.relative_to(root)


SAME_PATHS = PathMap()


def read_path_map(given: Sequence[str]) -> PathMap:
    """The map that SERVER=LOCAL arguments make; LOCAL may be relative. Raises UsageError."""
    pairs = []
    for text in given:
        server, equals, here = text.partition("=")
        if not (equals and server.startswith("/") and here):
            raise UsageError(
                f"--path-map {text!r} is no pair of folders",
                why="it is the server's folder, an equals sign, and the same folder as it is seen here",
                next="for example --path-map /work=/home/me/work",
            )
        if ".." in PurePosixPath(server).parts:
            raise UsageError(f"--path-map {text!r} has '..' in it", next="write the folder's own path")
        pairs.append((PurePosixPath(server), Path(here).expanduser().absolute()))
    return PathMap(tuple(dict(pairs).items()))
