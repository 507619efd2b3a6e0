"""The links of README and docs that lead elsewhere. ``python -m tests.docs.elsewhere`` lists them; ``--fetch`` asks for each,
once, with a time limit. The suite does not: it has no network, and other people's servers are not our tests."""

from __future__ import annotations

import sys
import urllib.request

from tests.docs.pages import links, name, pages


def external() -> dict[str, list[str]]:
    """Pages by address."""
    found: dict[str, list[str]] = {}
    for page in pages():
        for target in links(page):
            if "://" in target:
                found.setdefault(target, []).append(name(page))
    return found


def answers(address: str) -> str:
    """ "ok", or why not."""
    request = urllib.request.Request(address, headers={"User-Agent": "trackbridge-docs"})
    try:
        with urllib.request.urlopen(request, timeout=10):
            return "ok"
    except OSError as error:
        return str(error)


def main() -> int:
    bad = 0
    for address, where in sorted(external().items()):
        said = answers(address) if "--fetch" in sys.argv else ""
        bad += said not in ("", "ok")
        print(address, ", ".join(sorted(set(where))), said, sep="  ")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
