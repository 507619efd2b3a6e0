"""The exported names, exactly: adding or losing one is a decision, not an accident."""

from __future__ import annotations

import trackbridge

PUBLIC = {
    "Anomaly", "Run", "RunRecord", "SkipPlan", "SpikeCapsule", "TrackbridgeConfig", "TrackbridgeError", "__version__",
    "accelerate", "detect", "hf", "init", "interventions", "lightning", "load", "pull", "replay", "rollback", "testing",
}  # fmt: skip


def test_the_exported_names_are_these() -> None:
    assert set(trackbridge.__all__) == PUBLIC
    assert set(dir(trackbridge)) == PUBLIC


def test_every_exported_name_can_be_had() -> None:
    for name in PUBLIC:
        assert getattr(trackbridge, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(trackbridge, "no_such_name")


def test_replay_exports_its_contract() -> None:
    assert {"ReplayReport", "Rebuilt", "rerun"} <= set(dir(trackbridge.replay))


def test_no_function_is_shadowed_by_a_submodule() -> None:
    """Importing a submodule puts it into the package under its own name, whatever was there."""
    from pathlib import Path

    files = {path.stem for path in Path(trackbridge.__file__).parent.iterdir()}
    assert not files & {name.casefold() for name in PUBLIC - {"interventions", "replay", "testing", "Run"}}
