"""The published JSON schema is the one of the code."""

from __future__ import annotations

import json
from pathlib import Path

from trackbridge.capsule import json_schema

SCHEMA = Path(__file__).parent.parent / "docs" / "capsule.schema.json"


def test_the_schema_is_published() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == json_schema(), (
        "run: python -c 'from trackbridge.capsule import json_schema as s; import json; "
        "print(json.dumps(s(), indent=1))' > docs/capsule.schema.json"
    )
