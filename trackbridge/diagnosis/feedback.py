"""What replays found out, back into the ranking of hypotheses.

A replay as recorded asks whether the step comes back at all, a counterfactual whether one change takes it away. Both weigh more
than what was read from the record, so what they support goes first and what they refute goes behind "unknown".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trackbridge.lab import CounterfactualReport, ReplayReport
from trackbridge.lab.counterfactuals import Try
from trackbridge.records import Hypothesis

MARK = "replay: "
"""How evidence from a replay begins; what an earlier replay said is replaced by what a later one says."""
_TRANSIENT = "hardware-fault"
_SOUND = ("exact", "within-noise")
_SUPPORTED, _OPEN, _REFUTED = -1, 0, 1


def informed(
    hypotheses: Sequence[Hypothesis],
    replay: ReplayReport | None = None,
    counterfactuals: CounterfactualReport | None = None,
) -> tuple[Hypothesis, ...]:
    """`hypotheses` ranked anew with what the reports say. The same reports give the same answer, however often.

    A step that does not come back speaks for ``hardware-fault`` (which is added if it was not there), one that does against it;
    where the environment differs from the recording's, or every number comes back and only a random state does not, the ranking
    stays.
    A change that takes the anomaly away supports the hypotheses that name it as their test, in the order in which the table
    ranks the changes; one that does not refutes them. Changes tried on a replay that is not the record say nothing.
    """
    plain = [_without_marks(hypothesis) for hypothesis in hypotheses]
    verdict = counterfactuals.verdict if counterfactuals is not None else replay.verdict if replay is not None else None
    if verdict == "not-reproduced" and not _numbers_come_back(replay) and all(h.name != _TRANSIENT for h in plain):
        plain.append(Hypothesis(_TRANSIENT, intervention="rerun"))
    judged = [_judged(h, place, verdict, replay, counterfactuals) for place, h in enumerate(plain)]
    return tuple(hypothesis for _, hypothesis in sorted(judged, key=lambda pair: pair[0]))


def _judged(
    hypothesis: Hypothesis,
    place: int,
    verdict: str | None,
    replay: ReplayReport | None,
    counterfactuals: CounterfactualReport | None,
) -> tuple[tuple[int, int, int], Hypothesis]:
    """((standing, rank of the change, place before), the hypothesis with what was found)."""
    if hypothesis.name == _TRANSIENT and verdict in ("not-reproduced", *_SOUND):
        if _numbers_come_back(replay):
            said = "run again, every number comes back; only the random state that a step left behind does not"
            return (_OPEN, 0, place), _with(hypothesis, said, False)
        if verdict == "not-reproduced":
            where = f"; first difference: {replay.first_divergence}" if replay is not None and replay.first_divergence else ""
            said = f"run again from the same state, data and random numbers, the record does not come back{where}"
            if replay is not None and replay.environment:
                said += f"; but {replay.environment[0].name} differs from the recording's too"
                return (_OPEN, 0, place), _with(hypothesis, said, True)
            return (_SUPPORTED, 0, place), _with(hypothesis, said, True)
        said = f"run again, every step comes back ({verdict}): nothing transient happened in this window"
        return (_REFUTED, 0, place), _with(hypothesis, said, False)
    if counterfactuals is None or counterfactuals.verdict not in _SOUND or hypothesis.name == _TRANSIENT:
        return (_OPEN, 0, place), hypothesis
    tried = _tried(hypothesis, counterfactuals.tries)
    if tried is None:
        return (_OPEN, 0, place), hypothesis
    prevented = tried.outcome == "prevented"
    effect = "the anomaly is gone" if prevented else "the anomaly is still there"
    standing = (_SUPPORTED, tried.rank or 0) if prevented else (_REFUTED, 0)
    return (*standing, place), _with(hypothesis, f"with {tried.what} {effect}", prevented)


def _numbers_come_back(replay: ReplayReport | None) -> bool:
    """Not reproduced for another reason than a number: no fault of the machine is seen."""
    return replay is not None and replay.verdict == "not-reproduced" and bool(replay.steps) and replay.first_divergence is None


def _tried(hypothesis: Hypothesis, tries: Iterable[Try]) -> Try | None:
    """The try of the change that would test `hypothesis`: under its whole name, else the best of the same kind."""
    ran = [t for t in tries if t.ran]
    wanted = hypothesis.intervention
    if wanted is None or wanted == "rerun":
        return None
    exact = [t for t in ran if t.name == wanted]
    alike = [t for t in ran if t.name.partition("=")[0] == wanted.partition("=")[0]]
    return next(iter(exact or sorted(alike, key=lambda t: t.rank or 0)), None)


def _with(hypothesis: Hypothesis, said: str, supports: bool) -> Hypothesis:
    text = (MARK + said,)
    if supports:
        return replace(hypothesis, evidence_for=(*text, *hypothesis.evidence_for))
    return replace(hypothesis, evidence_against=(*text, *hypothesis.evidence_against))


def _without_marks(hypothesis: Hypothesis) -> Hypothesis:
    sides = [
        tuple(text for text in side if not text.startswith(MARK))
        for side in (hypothesis.evidence_for, hypothesis.evidence_against)
    ]
    return replace(hypothesis, evidence_for=sides[0], evidence_against=sides[1])
