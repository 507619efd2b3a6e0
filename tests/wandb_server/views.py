"""Views: reports (``runs``), drafts and saved workspaces (``project-view``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.wandb_server.graphql import Object, connection, node_id
from tests.wandb_server.runs import NOW


@dataclass
class View:
    id: str
    entity: str
    project: str
    name: str = ""
    display: str = ""
    description: str = ""
    kind: str = "runs"
    spec: str = "{}"


class Views:
    def __init__(self, project: Callable[[str, str], Object], viewer: Callable[[], Object]) -> None:
        self.all: dict[str, View] = {}
        self.project, self.viewer = project, viewer

    def upsert(self, given: Object) -> Object:
        given = {key: value for key, value in given.items() if value is not None}
        inserted = given.get("id") not in self.all
        id = node_id("View", len(self.all) + 1) if inserted else given["id"]
        view = self.all.setdefault(id, View(id, given.get("entityName", ""), given.get("projectName", "")))
        fields = {"name": "name", "displayName": "display", "description": "description", "type": "kind", "spec": "spec"}
        for theirs, ours in fields.items():
            setattr(view, ours, given.get(theirs, getattr(view, ours)))
        return {"view": self.show(id), "inserted": inserted}

    def show(self, id: str) -> Object | None:
        view = self.all.get(id)
        if view is None:
            return None
        return {
            "__typename": "View", "id": view.id, "name": view.name, "displayName": view.display,
            "description": view.description,
            "spec": view.spec, "type": view.kind, "createdAt": NOW, "updatedAt": NOW, "user": self.viewer, "viewCount": 0,
            "previewUrl": None, "locked": False, "project": lambda: self.project(view.entity, view.project),
        }  # fmt: skip

    def of(self, entity: str, project: str, kind: str, name: str | None, **page: Any) -> Object:
        def wanted(view: View) -> bool:
            return (view.entity, view.project, view.kind) == (entity, project, kind) and name in (None, "", view.name)

        return connection([view.id for view in self.all.values() if wanted(view)], self.show, **page)
