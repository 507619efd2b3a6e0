"""Artifacts: collections with versions and aliases, manifests, upload and download of their files."""

# ruff: noqa: N803 - arguments of resolvers have the names that the client gives them
from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.wandb_server.graphql import Object, connection, node_id
from tests.wandb_server.runs import NOW, Run

Key = tuple[str, str, str]
"""(entity, project, collection)"""


@dataclass
class Collection:
    key: Key
    kind: str
    versions: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return node_id("ArtifactCollection", "/".join(self.key))


@dataclass
class Version:
    id: str
    collection: Collection
    digest: str
    run: Key
    metadata: str | None = None
    description: str | None = None
    state: str = "PENDING"
    index: int | None = None
    wanted: list[str] = field(default_factory=list)
    manifest: str | None = None


class Artifacts:
    """`storage` is the server's blob store; what `storage_url` hands out is PUT and GET there."""

    def __init__(
        self, storage: dict[str, bytes], storage_url: Callable[[str], str], project: Callable[[str, str], Object]
    ) -> None:
        self.storage, self.storage_url, self.project = storage, storage_url, project
        self.run: Callable[[Key], Run | None] = lambda key: None
        self.show_run: Callable[[Run | None], Object | None] = lambda run: None
        self.collections: dict[Key, Collection] = {}
        self.versions: dict[str, Version] = {}
        self.manifests: dict[str, tuple[str, str]] = {}
        self.clients: dict[str, str] = {}
        self._numbers = count(1)

    def files(self, collection: Key, alias: str = "latest") -> dict[str, bytes]:
        """Bytes by path of one committed version: what a test compares."""
        version = self.versions[self.collections[collection].aliases[alias]]
        return {name: self.storage[path] for name, path in self._entries(version)}

    # -- mutations ---------------------------------------------------------------------------------------------------

    def create(self, given: Object, entity: str) -> Object:
        key = (given["entityName"] or entity, given["projectName"], given["artifactCollectionName"])
        collection = self.collections.setdefault(key, Collection(key, given["artifactTypeName"]))
        if collection.kind != given["artifactTypeName"]:
            raise ValueError(f"artifact {key[2]} already exists with type {collection.kind}")
        latest = collection.versions[-1] if collection.versions else None
        same = (self.versions[i] for i in collection.versions if self.versions[i].digest == given["digest"])
        version = next(same, None) if given.get("enableDigestDeduplication") else None
        if version is None:
            version = Version(
                node_id("Artifact", next(self._numbers)), collection, given["digest"], (*key[:2], given.get("runName") or "")
            )
            version.metadata, version.description = given.get("metadata"), given.get("description")
            self.versions[version.id] = version
        version.wanted = [alias["alias"] for alias in given.get("aliases") or ()]
        if version.state == "COMMITTED":
            self._name(version)
        if given.get("clientID"):
            self.clients[given["clientID"]] = version.id
        shown = self.show(version)
        shown["artifactSequence"] = {"id": collection.id, "latestArtifact": {"id": latest} if latest else None}
        return {"artifact": shown}

    def create_manifest(self, given: Object) -> Object:
        id = node_id("ArtifactManifest", next(self._numbers))
        self.manifests[id] = (given["artifactID"], f"manifests/{_plain(id)}/{given['name']}")
        return self.update_manifest({"artifactManifestID": id})

    def update_manifest(self, given: Object) -> Object:
        id = given["artifactManifestID"]
        version, path = self.manifests[id]
        self.versions[version].manifest = path
        url = self.storage_url(path)
        return {
            "artifactManifest": {
                "id": id,
                "file": {"id": node_id("File", path), "uploadUrl": url, "uploadHeaders": [], "directUrl": url},
            }
        }

    def create_files(self, given: Object) -> Object:
        def node(file: Object) -> Object:
            path = _blob(file["artifactID"], file["md5"])
            return {
                "id": node_id("File", path), "name": file["name"], "displayName": file["name"], "storagePath": path,
                "uploadUrl": self.storage_url(path), "uploadHeaders": [], "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }  # fmt: skip

        return {"files": {"edges": [{"node": node(file)} for file in given["artifactFiles"]]}}

    def commit(self, given: Object) -> Object:
        """Refuses a version whose files did not all arrive."""
        version = self.versions[given["artifactID"]]
        missing = [name for name, path in self._entries(version) if path not in self.storage]
        if missing:
            raise ValueError(f"files never arrived: {missing}")
        version.state = "COMMITTED"
        if version.index is None:
            version.index = len(version.collection.versions)
            version.collection.versions.append(version.id)
        self._name(version)
        return {"artifact": self.show(version)}

    def use(self, given: Object) -> Object:
        run = self.run((given["entityName"], given["projectName"], given["runName"]))
        if run and given["artifactID"] not in run.used:
            run.used.append(given["artifactID"])
        return {"artifact": self.show(self.versions[given["artifactID"]])}

    def _name(self, version: Version) -> None:
        for alias in (*version.wanted, "latest"):
            version.collection.aliases[alias] = version.id

    # -- queries -----------------------------------------------------------------------------------------------------

    def of_run(self, run: Run) -> list[Object]:
        key = (run.entity, run.project, run.name)
        return [self.show(version) for version in self.versions.values() if version.run == key and version.state == "COMMITTED"]

    def by_id(self, id: str) -> Object | None:
        return self.show(self.versions[id]) if id in self.versions else None

    def by_name(self, entity: str, project: str, name: str) -> Object | None:
        """A membership from ``collection:alias``, ``collection:v3`` or ``collection:digest``."""
        collection, _, alias = name.partition(":")
        return self._membership(self.collections.get((entity, project, collection)), alias or "latest")

    def kind(self, entity: str, project: str, name: str) -> Object | None:
        found = [c for key, c in self.collections.items() if key[:2] == (entity, project) and c.kind == name]
        if not found:
            return None
        return {
            "__typename": "ArtifactType", "id": node_id("ArtifactType", name), "name": name, "description": None,
            "createdAt": NOW,
            "artifactCollection": lambda name: self.collection((entity, project, name)),
            "artifactCollections": lambda first=None, after=None, **_: (
                connection(found, lambda c: self.collection(c.key), first, after)
            ),
        }  # fmt: skip

    def collection(self, key: Key) -> Object | None:
        found = self.collections.get(key)
        if found is None:
            return None

        def versions(first: int | None = None, after: str | None = None, **_: Any) -> Object:
            page = connection(reversed(found.versions), self.by_id, first, after)
            for edge in page["edges"]:
                edge["version"] = f"v{edge['node']['versionIndex']}"
            return page

        return {
            "__typename": "ArtifactSequence", "__interface": "ArtifactCollection", "id": found.id, "name": key[2],
            "state": "READY",
            "description": None, "createdAt": NOW, "updatedAt": NOW, "project": lambda: self.project(*key[:2]),
            "tags": connection([]),
            "defaultArtifactType": {"name": found.kind}, "digestAlgorithm": "MANIFEST_MD5", "artifacts": versions,
            "latestArtifact": lambda: self.by_id(found.versions[-1]) if found.versions else None,
            "aliases": lambda first=None, after=None: connection(found.aliases, self._alias, first, after),
            "artifactMembership": lambda aliasName: self._membership(found, aliasName),
        }  # fmt: skip

    def show(self, version: Version) -> Object:
        entries = self._manifest(version)
        named = [alias for alias, id in version.collection.aliases.items() if id == version.id]
        return {
            "__typename": "Artifact", "id": version.id, "artifactSequence": lambda: self.collection(version.collection.key),
            "versionIndex": version.index, "artifactType": {"name": version.collection.kind},
            "description": version.description,
            "metadata": version.metadata, "ttlDurationSeconds": -2, "ttlIsInherited": True, "tags": [], "historyStep": None,
            "state": version.state, "size": sum(entry.get("size", 0) for entry in entries.values()), "digest": version.digest,
            "digestAlgorithm": "MANIFEST_MD5", "commitHash": "0" * 20, "fileCount": len(entries), "createdAt": NOW,
            "updatedAt": NOW,
            "aliases": [{**self._alias(alias),
            "artifactCollection": lambda: self.collection(version.collection.key)} for alias in named],
            "currentManifest": {"id": "manifest",
            "file": {"directUrl": self.storage_url(version.manifest)}} if version.manifest else None,
            "createdBy": lambda: self.show_run(self.run(version.run)), "usedBy": connection([]),
            "artifactMemberships": lambda **_: connection([self._membership(version.collection, f"v{version.index}")]),
            "files": lambda **asked: self._files(version, **asked),
        }  # fmt: skip

    def _alias(self, alias: str) -> Object:
        return {"__typename": "ArtifactAlias", "id": node_id("Alias", alias), "alias": alias}

    def _membership(self, collection: Collection | None, alias: str) -> Object | None:
        if collection is None:
            return None
        numbered = re.fullmatch(r"v(\d+)", alias)
        id = collection.aliases.get(alias)
        if id is None and numbered and int(numbered[1]) < len(collection.versions):
            id = collection.versions[int(numbered[1])]
        if id is None:
            return None
        shown = self.show(self.versions[id])
        return {
            "__typename": "ArtifactCollectionMembership", "id": node_id("Membership", id),
            "versionIndex": shown["versionIndex"],
            "createdAt": NOW, "aliases": shown["aliases"], "artifactCollection": lambda: self.collection(collection.key),
            "artifact": shown, "files": shown["files"],
        }  # fmt: skip

    def _files(
        self, version: Version, names: list[str] | None = None, first: int | None = None, after: str | None = None, **_: Any
    ) -> Object:
        def node(entry: tuple[str, str]) -> Object:
            url = self.storage_url(entry[1])
            return {
                "__typename": "File", "id": node_id("File", entry[0]), "name": entry[0], "displayName": entry[0], "url": url,
                "directUrl": url, "sizeBytes": None, "storagePath": None, "mimetype": None, "updatedAt": None, "digest": None,
                "md5": None,
            }  # fmt: skip

        return connection([entry for entry in self._entries(version) if not names or entry[0] in names], node, first, after)

    def _manifest(self, version: Version) -> dict[str, Any]:
        data = self.storage.get(version.manifest or "")
        return dict(json.loads(data)["contents"]) if data else {}

    def _entries(self, version: Version) -> Iterator[tuple[str, str]]:
        for name, entry in self._manifest(version).items():
            yield name, _blob(entry.get("birthArtifactID") or version.id, entry["digest"])


def _blob(artifact: str, md5: str) -> str:
    """Where a file lives: content-addressed within the version that first had it."""
    return f"blobs/{_plain(artifact)}/{base64.b64decode(md5).hex()}"


def _plain(id: str) -> str:
    return re.sub(r"\W", "_", id)
