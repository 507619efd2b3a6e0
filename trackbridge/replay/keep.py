"""Keeping what the lab found out in the capsule itself, where every page, tracker and colleague sees it."""

from __future__ import annotations

from pathlib import Path

from trackbridge import capsule as capsules
from trackbridge import lab
from trackbridge.capsule import SpikeCapsule
from trackbridge.lab import CounterfactualReport, ReplayReport


def keep(
    capsule: SpikeCapsule, *, replay: ReplayReport | None = None, counterfactuals: CounterfactualReport | None = None
) -> SpikeCapsule:
    """Write the reports into the folder of `capsule` and make its pages anew; returns the capsule as it is now.

    An older report of the same kind is replaced, the other kind stays. The recorded files do not change; the hypotheses are
    ranked anew with what was found. A post-mortem that somebody
    wrote into stays as it is; the new one is then ``lab/post-mortem.md``.
    """

    def change(copy: SpikeCapsule, folder: Path) -> SpikeCapsule:
        from trackbridge.diagnosis.feedback import informed
        from trackbridge.reports.post_mortem import post_mortem
        from trackbridge.reports.spike import spike_page

        files = dict(copy.files)
        place = f"{lab.FOLDER}/{capsules.POST_MORTEM}" if _written_into(copy, folder) else capsules.POST_MORTEM
        (folder / lab.FOLDER).mkdir(exist_ok=True)
        for name, report in ((lab.REPLAY, replay), (lab.COUNTERFACTUALS, counterfactuals)):
            if report is not None:
                _write(folder / name, report.model_dump_json(indent=1))
                files[name] = capsules.entry(folder / name)
        now = copy.model_copy(update={"files": files}).at(folder)
        ranked = informed(now.anomaly.hypotheses, now.replay, now.counterfactuals)
        now = now.model_copy(update={"anomaly": now.anomaly.updated(hypotheses=ranked)}).at(folder)
        for name, text in ((place, post_mortem(now)), ("report.html", spike_page(now))):
            _write(folder / name, text)
        return now

    return capsules.rewrite(capsule, change)


def _written_into(capsule: SpikeCapsule, folder: Path) -> bool:
    """Whether the post-mortem is no longer the one that we made."""
    path = folder / capsules.POST_MORTEM
    if (folder / lab.FOLDER / capsules.POST_MORTEM).exists():  # it was, the last time
        return True
    return path.exists() and capsules.entry(path) != capsule.files.get(capsules.POST_MORTEM)


def _write(path: Path, text: str) -> None:
    """A new file in the place of an old one, which another folder may share."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
