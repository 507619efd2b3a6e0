"""Reports and workspaces on a W&B server: what a run has there, and a view made or updated under its own name.

Runs in the client's process (`wandb_process`), like everything that talks to W&B. A view is found again by its name, which we
choose; where a server has given it another, by its title together with that name in its description. A title alone is nobody's:
runs of one name have the same, and so may a report that a person wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from trackbridge.backends.wandb_fetch import KIND
from trackbridge.errors import ReferenceNotFoundError

REPORT, WORKSPACE = "runs", "project-view"
RUNS = 20
"""Runs of a project that are asked for their series."""

SURVEY = """
query TrackbridgeSurvey($entity: String!, $project: String!, $run: String!) {
  project(name: $project, entityName: $entity) { run(name: $run) { name displayName state historyKeys summaryMetrics } }
}
"""
SURVEY_ALL = """
query TrackbridgeSurveyAll($entity: String!, $project: String!, $first: Int!) {
  project(name: $project, entityName: $entity) {
    runs(first: $first, order: "-created_at") { edges { node { name historyKeys } } }
  }
}
"""
FIND = """
query TrackbridgeViews($entity: String!, $project: String!, $kind: String!, $name: String, $after: String) {
  project(name: $project, entityName: $entity) {
    allViews(viewType: $kind, viewName: $name, first: 100, after: $after) {
      edges { node { id name displayName description } }
      pageInfo { endCursor hasNextPage }
    }
  }
}
"""
UPSERT = """
mutation TrackbridgeUpsertView(
  $id: ID, $entity: String, $project: String, $kind: String, $name: String, $title: String, $about: String, $spec: String!
) {
  upsertView(input: {
    id: $id, entityName: $entity, projectName: $project, type: $kind, name: $name, displayName: $title, description: $about,
    spec: $spec, createdUsing: WANDB_SDK
  }) { view { id name } inserted }
}
"""


@dataclass(frozen=True)
class View:
    """A report (`kind` REPORT) or workspace (WORKSPACE) to be on the server. `name` identifies it, `title` is for people."""

    entity: str
    project: str
    kind: str
    name: str
    title: str
    spec: dict[str, Any]

    @property
    def about(self) -> str:
        """Its description on the server."""
        return f"Made by trackbridge ({self.name}). Making it again replaces what is in it."


@dataclass(frozen=True)
class Published:
    """`created` is False when a view that was there has been updated."""

    url: str
    id: str
    created: bool


@dataclass(frozen=True)
class Survey:
    """What a run has on the server, or the newest runs of a project have together (then only `entity` and `keys`). `anomalies`:
    the summary's facts by id; `capsules`: (artifact's name, step) of its capsules, oldest first."""

    entity: str
    name: str
    keys: list[str]
    anomalies: dict[str, dict[str, Any]]
    capsules: list[tuple[str, int]]


def survey(entity: str, project: str, run: str) -> Survey:
    """Ask the server about a run; `run` "" about the newest runs of the project; `entity` "" is the user's own. Raises
    `ReferenceNotFoundError` when it has none."""
    api = _api()
    entity = entity or api.default_entity
    where = {"entity": entity, "project": project}
    if not run:
        found = _ask(api, SURVEY_ALL, {**where, "first": RUNS}).get("project")
        if found is None:
            raise ReferenceNotFoundError(f"W&B has no project {entity}/{project}")
        keys = {key for edge in found["runs"]["edges"] for key in _keys(edge["node"])}
        return Survey(entity, "", sorted(keys), {}, [])
    held = (_ask(api, SURVEY, {**where, "run": run}).get("project") or {}).get("run")
    if held is None:
        raise ReferenceNotFoundError(f"W&B has no run {entity}/{project}/{run}")
    summary = json.loads(held.get("summaryMetrics") or "{}")
    anomalies = {key[len("anomaly/") :]: value for key, value in summary.items() if _is_anomaly(key, value)}
    artifacts = api.run(f"{entity}/{project}/{run}").logged_artifacts()
    capsules = [(a.name.partition(":")[0], int(a.metadata.get("step", -1))) for a in artifacts if a.type == KIND]
    return Survey(entity, held.get("displayName") or run, _keys(held), anomalies, capsules)


def publish(view: View) -> Published:
    """Make or update `view`; returns where it is."""
    api = _api()
    there = _find(api, view)
    asked = {
        "id": there, "entity": view.entity, "project": view.project, "kind": view.kind, "name": view.name, "title": view.title,
        "about": view.about, "spec": json.dumps(view.spec),
    }  # fmt: skip
    answer = _ask(api, UPSERT, asked)["upsertView"]
    return Published(_url(api, view, answer["view"]), answer["view"]["id"], there is None)


def _find(api: Any, view: View) -> str | None:
    """The id of the view on the server, None if it is not there yet."""
    named = next((node["id"] for node in _views(api, view, view.name) if node["name"] == view.name), None)
    return named or next((node["id"] for node in _views(api, view, None) if _renamed(node, view)), None)


def _renamed(node: dict[str, Any], view: View) -> bool:
    return node["displayName"] == view.title and view.name in (node["description"] or "")


def _views(api: Any, view: View, name: str | None) -> Iterator[dict[str, Any]]:
    after = None
    while True:
        asked = {"entity": view.entity, "project": view.project, "kind": view.kind, "name": name, "after": after}
        project = _ask(api, FIND, asked).get("project")
        if project is None:
            raise ReferenceNotFoundError(f"W&B has no project {view.entity}/{view.project}")
        yield from (edge["node"] for edge in project["allViews"]["edges"])
        page = project["allViews"]["pageInfo"]
        after = page["endCursor"]
        if not page["hasNextPage"]:
            return


def _url(api: Any, view: View, node: dict[str, Any]) -> str:
    base = f"{_app(api)}/{quote(view.entity)}/{quote(view.project)}"
    if view.kind == WORKSPACE:
        return f"{base}?nw={node['name'].removeprefix('nw-').removesuffix('-v')}"
    return f"{base}/reports/{quote(view.title.replace(' ', '-'), safe='-')}--{node['id']}"


def _api() -> Any:
    import wandb

    return wandb.Api(timeout=30)


def _app(api: Any) -> str:
    return str(api._service_api.app_url).rstrip("/")


def _ask(api: Any, query: str, variables: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = api._service_api.execute_graphql(query, variables, timeout=30)
    return answer


def _keys(run: dict[str, Any]) -> list[str]:
    return sorted((run.get("historyKeys") or {}).get("keys") or {})


def _is_anomaly(key: str, value: Any) -> bool:
    return key.startswith("anomaly/") and isinstance(value, dict) and "step" in value
