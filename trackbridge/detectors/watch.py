"""`Watch`: rows in, anomalies out. Runs in the scribe thread, once per step row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors import nonfinite
from trackbridge.detectors.aftermath import AGAIN, CAUSE, Aftermath, Owner
from trackbridge.detectors.band import BandDetector, Tuning
from trackbridge.detectors.base import FloatArray, Verdict
from trackbridge.detectors.episodes import Episode, severity
from trackbridge.detectors.monitors import Foreign, Level, Look, Regime, Sign, monitors
from trackbridge.detectors.periodic import Periods
from trackbridge.detectors.plan import Plan, followed
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.detectors.witness import Witness
from trackbridge.records import Anomaly, Row, Schema, StepContext

_REGIME = ("lr_restart", "epoch", "batch_size", "sequence_length")
_SUDDEN = 5  # a rise found by its lean within this many steps of its onset is a spike, not a drift
_FAR = 64  # steps before the onset in which the drift of a layer counts as its beginning
_PLANS = 512  # schemas remembered
_MOVES = 0.01  # sigmas from its expectation below which a gradient norm stands still
_LAYERS = 0.3  # severity of an event that the loss does not follow, at most


class Watch:
    """Detection over the rows of one run. `update` is called with every step row in order.

    At most one episode of each sort is open at a time: a non-finite one, an excursion (spike, shift, divergence), a drift, and
    one per monitor. What follows a monitor's fault until things have settled is the same event (`aftermath`)."""

    def __init__(self, settings: DetectionConfig | None = None, tuning: Tuning | None = None) -> None:
        self.settings = settings or DetectionConfig()
        self.detector = BandDetector(self.settings, tuning)
        self.amp_skips = 0
        self._plans: dict[int, Plan] = {}
        self._open: dict[str, Episode] = {}
        self._periods = Periods()
        self._witness = Witness(self.settings)
        self._standing = nonfinite.Standing()
        self._aftermath = Aftermath()
        self._groups: dict[str, Anomaly] = {}
        self._skipped = -1.0
        self._told_skips: set[int] = set()
        self._resumed = -1
        self._monitors = {monitor.NAME: monitor for monitor in monitors(self.settings)}
        self._regime = cast(Regime, self._monitors[Regime.NAME])
        self._row: Row | None = None
        self._rested = -1  # until this step no further event of single layers is told
        self._latest: Episode | None = None  # the latest excursion that is over: its cause may be seen only now
        self._ids: set[str] = set()  # outlives `load_state_dict`: a loop that rolls back may see a step twice
        self._columns()

    def note(self, event: str, step: int) -> None:
        """Tell of a known regime change. "resume": later anomalies carry ``after_resume`` for a while. "amp_skip": the
        gradients of `step` mean nothing. "lr_restart", "epoch", "batch_size", "sequence_length": the bands learn anew for
        a few steps and stay silent meanwhile. Other events change nothing."""
        if event == "resume":
            self._resumed = step
        elif event == "amp_skip":
            self._told_skips.add(step)
        elif event in _REGIME:
            self.detector.relearn()
            if (level := self._monitors.get(Level.NAME)) is not None:
                level.changed(event)
        if event in ("resume", "batch_size", "sequence_length"):
            for monitor in self._monitors.values():
                monitor.changed(event)

    def wait(self, seconds: float) -> list[Anomaly]:
        """No step has come for `seconds`, pauses not counted: is that a stall? Ask now and then, by whatever clock there is."""
        row = self._row
        if row is None or not self.settings.enabled:
            return []
        late = replace(row, step=row.step + 1, time=row.time + seconds)
        signs = [(name, monitor.waiting(seconds, late.step)) for name, monitor in self._monitors.items()]
        return [anomaly for name, sign in signs if sign is not None for anomaly in self._sign(name, sign, late)]

    def update(self, row: Row, context: StepContext | None = None) -> list[Anomaly]:
        """New anomalies of this row, and newer versions (same `id`) of open ones. `context` is the step's, where known."""
        if row.kind != "step" or not self.settings.enabled:
            return []
        plan = self._plans.get(id(row.schema)) or self._plan(row.schema)
        self._row = row
        skip = self._amp_skip(row, plan)
        out = self._signs(Look(row, plan.places, context, self._recent(row.step)))
        out += self._nonfinite(row, plan, skip)
        self._present[:] = False
        if not skip and self._regime.judged:
            self._values[plan.positions] = row.values[plan.columns]
            self._unclip(row, plan)
            self._present[plan.positions] = True
        judged = self.detector.update(row.step, self._values, self._present, self._regime.widen)
        verdicts = [v for v in judged if v.kind != "nonfinite"]
        return out + self._continue(row, verdicts) + self._begin(row, verdicts) + self._begin_layers(row, verdicts)

    def finish(self) -> list[Anomaly]:
        """Close open episodes; they did not recover."""
        closed = [episode.refreshed() for episode in self._open.values()]
        self._open.clear()
        return closed

    # -- columns ---------------------------------------------------------------------------------------------------

    def _plan(self, schema: Schema) -> Plan:
        wanted, known = followed(schema), set(self.detector.series)
        new = [name for name in wanted if name not in known]
        if new:
            self.detector.bind((*self.detector.series, *new))
            self._columns()
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[id(schema)] = Plan.of(schema, wanted, self.detector.series)
        return plan

    def _columns(self) -> None:
        series = self.detector.series
        self._values: FloatArray = np.zeros(len(series))
        self._present = np.zeros(len(series), bool)
        self._is_head = np.array([is_loss(name) or is_global_gradient(name) for name in series], bool).reshape(len(series))

    def _amp_skip(self, row: Row, plan: Plan) -> bool:
        """True when the scaler skipped this step: its gradients say nothing about the model. A step that the guard left out
        is one whose loss was out of band: it is judged like any other."""
        skip = row.step in self._told_skips
        self._told_skips.discard(row.step)
        if plan.skipped >= 0:
            now = float(row.values[plan.skipped])
            guarded = any(row.values[i] > 0 for i in plan.guarded)
            skip |= now > max(self._skipped, 0.0) and not guarded
            self._skipped = now
        self.amp_skips += skip
        return skip

    def _unclip(self, row: Row, plan: Plan) -> None:
        """Layers' gradients are recorded as the optimizer used them; clipping would hide in all of them what one did."""
        if min(plan.clipping) < 0:
            return
        whole, clipped = (float(row.values[i]) for i in plan.clipping)
        if 0 < clipped < whole < math.inf:
            self._values[plan.layers] *= whole / clipped

    # -- non-finite ------------------------------------------------------------------------------------------------

    def _nonfinite(self, row: Row, plan: Plan, skip: bool) -> list[Anomaly]:
        bad = nonfinite.broken(row, plan.counts, plan.losses if skip else None)
        bad = self._standing.apart(row, bad, skip=skip)
        episode = self._open.get("nonfinite")
        late = episode is not None and row.step > episode.anomaly.step + self.settings.cascade_steps
        apart = self._standing.anew(row, bad, late=late, skip=skip)
        if apart is not bad:  # the event under way did not recover
            bad, episode = apart, None
        if not bad.any():
            if episode is None or skip:
                return []
            del self._open["nonfinite"]
            return [episode.refreshed(recovered_after=row.step - episode.anomaly.onset)]
        fresh = episode is None
        bad, notes = nonfinite.located(row, bad)
        if episode is None:
            episode = self._open["nonfinite"] = nonfinite.begin(
                self._name_it(row, "nonfinite"), row, bad, self._expected, (*self._notes(row.step), *notes)
            )
            episode.join(self._precursors(row.step))
        if row.step <= episode.anomaly.step + self.settings.cascade_steps:
            episode.join((row.schema.names[i], row.step, i) for i in np.flatnonzero(bad).tolist())
        return [episode.refreshed()] if fresh or len(episode.members) > episode.told else []

    def _expected(self, name: str) -> float:
        """The level of a tracked series, 0 for others: counters should be 0."""
        series = self.detector.series
        return self.detector.expected(series.index(name)) if name in series else 0.0

    # -- faults by name --------------------------------------------------------------------------------------------

    def _signs(self, look: Look) -> list[Anomaly]:
        """What the monitors say of this row: new events, ends of such, and notes on the excursion that a fault explains."""
        out = []
        for name, monitor in self._monitors.items():
            sign = monitor.update(look)
            if (event := monitor.regime()) is not None:
                self.note(event, look.step)
            if (end := monitor.over()) is not None:
                self._aftermath.over(name, end)
                if (episode := self._open.pop(name, None)) is not None:
                    self._aftermath.moved(episode, look.step)
                    out.append(episode.refreshed(recovered_after=end - episode.anomaly.onset))
            if sign is not None:
                out += self._sign(name, sign, look.row)
        return out

    def _sign(self, name: str, sign: Sign, row: Row) -> list[Anomaly]:
        if name == Level.NAME and "drift" in self._open:
            return []  # it is told already
        monitor = self._monitors[name]
        fault = monitor.CAUSAL and not isinstance(monitor, (Level, Foreign))  # those see an effect, and know no cause
        effect = self._effect(sign) if monitor.CAUSAL else None
        if effect is not None:
            if fault:
                onset = sign.onset if sign.earliest is None else sign.earliest
                self._aftermath.begin(name, effect, min(onset, effect.anomaly.onset), effect.anomaly.score)
            effect.join([(sign.series, sign.onset, 0)])
            return [effect.refreshed(notes=(*effect.anomaly.notes, sign.note))]
        owner = None if fault or not monitor.CAUSAL else self._aftermath.of(row.step if sign.kind == "drift" else sign.onset)
        if owner is not None:
            return [self._seen_too(name, sign, owner, row.step)]
        alike = self._alike(name, sign)
        if alike is not None:
            return [alike.refreshed(notes=(*alike.anomaly.notes, sign.note))]
        self._open.pop(name, None)  # the same again: an event of its own
        anomaly = Anomaly(
            id=self._name_it(row, sign.kind), kind=sign.kind, step=row.step, onset=sign.onset, severity=sign.severity,
            series=sign.series, value=sign.value, expected=sign.expected, score=sign.score, attempt=row.attempt, time=row.time,
            notes=(*self._notes(row.step), sign.note), terms=sign.terms,
        )  # fmt: skip
        episode = Episode(anomaly)
        episode.join([(sign.series, sign.onset, 0)])
        self._open[name] = episode
        if fault:
            self._aftermath.begin(name, episode, sign.onset if sign.earliest is None else sign.earliest)
        return [episode.refreshed()]

    def _seen_too(self, name: str, sign: Sign, owner: Owner, step: int) -> Anomaly:
        """What a monitor sees of the effects of a fault by name. A level that a series keeps from then on tells the event,
        unless an excursion does."""
        episode = owner.episode
        if name == Level.NAME and sign.kind == "shift":
            if not owner.worst:
                episode.become(sign.kind, sign.series, sign.value, sign.expected, sign.score, step)
                self._aftermath.saw(episode, sign.score)
            self._move(episode, name)
        self._aftermath.moved(episode, step)
        episode.join([(sign.series, sign.onset, 0)])
        return episode.refreshed(notes=(*episode.anomaly.notes, sign.note))

    def _move(self, episode: Episode, key: str) -> None:
        """`episode` goes on as the open one of the sort `key`."""
        for other in [other for other, each in self._open.items() if each is episode]:
            del self._open[other]
        episode.quiet, episode.quiet_since = 0, -1
        self._open[key] = episode

    def _effect(self, sign: Sign) -> Episode | None:
        """The excursion, under way or just over, that a fault seen only now has caused; or that `sign` sees too."""
        under_way = self._open.get("excursion")
        if under_way is not None and (is_loss(sign.series) or is_global_gradient(sign.series)):
            return under_way
        earliest = sign.onset if sign.earliest is None else sign.earliest
        for episode in (under_way, self._latest):
            if episode is not None and episode.anomaly.onset - CAUSE <= sign.onset and earliest <= episode.anomaly.onset:
                return episode
        return None

    def _alike(self, name: str, sign: Sign) -> Episode | None:
        """The open event of another further detector that tells the same series: one event, however many see it."""
        others = [key for key in self._open if key != name and isinstance(self._monitors.get(key), Foreign)]
        if not isinstance(self._monitors[name], Foreign):
            return None
        return next((self._open[key] for key in others if self._open[key].anomaly.series == sign.series), None)

    def _cause(self, onset: int) -> Episode | None:
        """The event of a level, of another detector or of single layers that an excursion from `onset` goes on with. It is no
        longer one of its own then."""
        for name in (*(name for name, monitor in self._monitors.items() if monitor.CAUSAL), "layers"):
            episode = self._open.get(name)
            if episode is not None and onset - CAUSE <= episode.anomaly.onset <= onset:
                return self._open.pop(name)
        return None

    # -- excursions and drifts -------------------------------------------------------------------------------------

    def _begin(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        heads = [v for v in verdicts if self._is_head[v.index] and v.kind != "shift" and self._says_enough(v, row, verdicts)]
        new: dict[str, Verdict] = {}
        for v in sorted(heads, key=lambda v: (not is_loss(self._name(v)), -v.score)):
            sudden = v.kind != "drift" or v.step - v.onset <= _SUDDEN
            new.setdefault("excursion" if sudden else "drift", v)
        out = []
        for key, v in new.items():
            if key in self._open or (key == "drift" and "excursion" in self._open) or self._within_drift(key, v):
                continue
            out += self._open_episode(row, key, v, verdicts)
        return out

    def _says_enough(self, v: Verdict, row: Row, verdicts: list[Verdict]) -> bool:
        """False for a value that needs another witness, see `witness`."""
        if v.kind != "spike":
            return True
        name, first, plan = self._name(v), bool(self.detector.run[v.index] == 1), self._plans[id(row.schema)]
        if is_loss(name):
            far = float(self.detector.sigmas[v.index])
            return self._witness.enough_loss(name, v, first=first, far=far, usual=self._usual_gradient(plan))
        if any(is_loss(self._name(w)) for w in verdicts):
            return True
        whole, clipped = (float(row.values[i]) if i >= 0 else math.nan for i in plan.clipping)
        return self._witness.enough_norm(name, v, first=first, whole=whole, clipped=clipped)

    def _usual_gradient(self, plan: Plan) -> bool:
        """The global gradient norm of this step is known, and in no way unusual. One that stands still, taken after a clip
        that always bites, says nothing."""
        d, at = self.detector, plan.witness
        known = at >= 0 and bool(self._present[at]) and int(d.seen[at]) > self.settings.warmup
        return known and _MOVES < abs(float(d.sigmas[at])) < self.settings.threshold

    def _begin_layers(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        """Single layers that stay out of their band while nothing else is wrong: one event of low severity for all of them.
        Not while the loss is falling: then layers change because the net learns."""
        cfg, d = self.settings.layers, self.detector
        busy = row.step < self._rested or any(key in self._open for key in ("excursion", "drift", "nonfinite", "layers"))
        if not cfg.enabled or busy or not verdicts or d.learning():
            return []
        lasting = [
            v for v in verdicts
            if v.kind == "spike" and not self._is_head[v.index] and v.score >= cfg.score and d.run[v.index] == cfg.after
        ]  # fmt: skip
        if not lasting:
            return []
        v = max(lasting, key=lambda v: v.score)
        self._rested = row.step + cfg.rest
        if (owner := self._aftermath.of(v.onset)) is not None:
            owner.episode.join((self._name(w), w.onset, w.index) for w in verdicts)
            owner.episode.leans(self._name(v), v)
            self._aftermath.moved(owner.episode, row.step)
            return [owner.episode.refreshed()]
        anomaly = Anomaly(
            id=self._name_it(row, "spike"), kind="spike", step=row.step, onset=v.onset,
            severity=min(severity("spike", v.score), _LAYERS), series=self._name(v), value=v.value, expected=v.expected,
            score=v.score, attempt=row.attempt, time=row.time, notes=(*self._notes(row.step), "the loss does not follow"),
        )  # fmt: skip
        episode = self._open["layers"] = Episode(anomaly)
        episode.join(self._precursors(v.onset))
        episode.join((self._name(w), w.onset, w.index) for w in verdicts)
        return [episode.refreshed()]

    def _within_drift(self, key: str, v: Verdict) -> bool:
        """True for a jump that is only the noise on top of a drift that has been told."""
        drift = self._open.get("drift")
        if key != "excursion" or drift is None or self._name(v) not in drift.members:
            return False
        bar = float(self.detector.units.bar[v.index])
        return v.score < AGAIN * bar

    def _name_it(self, row: Row, kind: str) -> str:
        """An id that this process has not given before."""
        plain = f"{row.attempt}-{row.step}-{kind}"
        name, again = plain, 1
        while name in self._ids:
            again += 1
            name = f"{plain}-{again}"
        self._ids.add(name)
        return name

    def _open_episode(self, row: Row, key: str, v: Verdict, verdicts: list[Verdict]) -> list[Anomaly]:
        owner = self._aftermath.of(v.onset)
        if owner is not None and not (owner.worst and v.score > AGAIN * owner.worst):
            return self._follow(row, key, v, verdicts, owner)
        kind = "spike" if key == "excursion" else "drift"
        first = self._periods.beat(v.onset) if key == "excursion" else None
        if first is not None and first in self._groups:
            return self._reopen(self._groups[first])
        cause = self._cause(v.onset) if key == "excursion" else None
        if cause is not None:
            cause.become(kind, self._name(v), v.value, v.expected, v.score, row.step)
            episode = self._open[key] = cause
        else:
            anomaly = Anomaly(
                id=self._name_it(row, kind), kind=kind, step=row.step, onset=v.onset,
                severity=severity(kind, v.score), series=self._name(v), value=v.value, expected=v.expected, score=v.score,
                attempt=row.attempt, time=row.time, notes=self._notes(row.step),
            )  # fmt: skip
            episode = self._open[key] = Episode(anomaly)
        if (held := self._witness.held(self._name(v), v.onset)) is not None:
            episode.worse(held.value, held.score, held.step)
        episode.join(self._precursors(v.onset))
        episode.join((self._name(w), w.onset, w.index) for w in verdicts)
        fresh = episode.refreshed()
        if key == "excursion":
            self._periods.add(v.onset, fresh.id)
            self._groups = {id: self._groups[id] for _, id in self._periods.latest if id in self._groups}
            self._groups[fresh.id] = fresh
        return [fresh]

    def _follow(self, row: Row, key: str, v: Verdict, verdicts: list[Verdict], owner: Owner) -> list[Anomaly]:
        """An excursion or a drift that is the effect of a fault by name. The first excursion tells the event from then on; a
        further one, and a drift, is a note."""
        episode, name = owner.episode, self._name(v)
        told = episode.told
        episode.join(self._precursors(v.onset))
        episode.join((self._name(w), w.onset, w.index) for w in verdicts)
        self._aftermath.moved(episode, row.step)
        if key == "drift":
            return [episode.refreshed()] if episode.leans(name, v) or len(episode.members) > told else []
        if not owner.worst:
            episode.become("spike", name, v.value, v.expected, v.score, row.step)
        else:
            episode.again(name, v, is_loss(name) and not is_loss(episode.anomaly.series))
        if (held := self._witness.held(name, v.onset)) is not None:
            episode.worse(held.value, held.score, held.step)
        self._aftermath.saw(episode, v.score)
        self._move(episode, key)
        return [episode.refreshed(recovered_after=None)]

    def _reopen(self, group: Anomaly) -> list[Anomaly]:
        """The next beat of a rhythm: the first beat's anomaly is told again, with the rhythm in its notes."""
        p = self._periods
        kept = (note for note in group.notes if not note.startswith("periodic: "))
        group = group.updated(notes=(*kept, f"periodic: every {p.distance} steps, {p.beats} times"))
        self._groups = {group.id: group}
        return [group]

    def _continue(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        out = []
        for owner in self._aftermath.unsettled(row.step):
            d = self.detector
            if (self._is_head & d.drifting() & (d.drift_onset >= owner.onset)).any():
                self._aftermath.moved(owner.episode, row.step)
        for key in [key for key in ("excursion", "drift", "layers") if key in self._open]:
            out += self._carry_on(key, self._open[key], row, verdicts)
        return out

    def _carry_on(self, key: str, episode: Episode, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        cfg, d = self.settings, self.detector
        if row.step <= episode.anomaly.step + cfg.cascade_steps:
            episode.join((self._name(v), v.onset, v.index) for v in verdicts)
        changed = False
        for v in verdicts:
            name = self._name(v)
            if name == episode.anomaly.series and key != "layers":
                episode.worse(v.value, v.score, row.step)
                if key == "excursion":
                    self._aftermath.saw(episode, v.score)
            elif is_loss(name) and not is_loss(episode.anomaly.series) and key == "excursion":
                episode.lead(name, v.value, v.expected, v.score, row.step)
                changed = True
        index = d.series.index(episode.anomaly.series)
        closing = self._stays(key, episode, index, verdicts)
        if closing is not None:
            self._close(key, episode, row.step)
            return [closing]
        began = episode.anomaly.onset
        who = np.ones_like(self._is_head) if key == "layers" else self._is_head
        active = d.drifting() if key == "drift" else (d.run > 0) | (d.drifting() & (d.drift_onset >= began))
        if any(d.series[i] in episode.members for i in np.flatnonzero(active & who).tolist()):
            episode.quiet = 0
        elif self._present[index]:
            episode.quiet_since = row.step if episode.quiet == 0 else episode.quiet_since
            episode.quiet += 1
            if episode.quiet >= cfg.quiet:
                self._close(key, episode, row.step)
                over = None if episode.stayed else episode.quiet_since - episode.anomaly.onset
                return [episode.refreshed(recovered_after=over)]
        if changed or (row.step == episode.anomaly.step + cfg.cascade_steps and len(episode.members) > episode.told):
            return [episode.refreshed()]
        return []

    def _close(self, key: str, episode: Episode, step: int) -> None:
        del self._open[key]
        self._aftermath.moved(episode, step)
        self._latest = episode if key == "excursion" else self._latest

    def _stays(self, key: str, episode: Episode, index: int, verdicts: list[Verdict]) -> Anomaly | None:
        """The closing version of an episode that ends at a new level instead of coming back; None if it goes on."""
        shifted = any(v.index == index and v.kind == "shift" for v in verdicts)
        if shifted and key != "drift":
            before = episode.anomaly.kind if episode.stayed else ""
            kind = "shift" if self.detector.settled[index] and before != "divergence" else "divergence"
        elif shifted:
            kind = "drift"
        elif self.detector.stayed()[index] and not self.detector.run[index]:
            kind = "drift" if key == "drift" else "shift"
        else:
            return None
        episode.stayed = True
        if key == "layers":
            return episode.refreshed(kind=kind)
        return episode.refreshed(kind=kind, severity=max(severity(kind, episode.anomaly.score), episode.anomaly.severity))

    def _precursors(self, onset: int) -> list[tuple[str, int, int]]:
        """Series that left their band before the onset and were still, or until just now, outside; and those in a drift."""
        d = self.detector
        outside = (d.last_out >= max(onset - 2, 0)) & (d.onset <= onset) & (d.onset >= onset - self.settings.lookback)
        near = self._is_head | (d.drift_onset >= onset - _FAR)  # a drift that was told may be as old as it is
        drifting = d.drifting() & (d.drift_onset <= onset) & near
        since = np.where(drifting, d.drift_onset, d.onset)
        return [(d.series[i], int(since[i]), i) for i in np.flatnonzero(outside | drifting).tolist()]

    def _name(self, verdict: Verdict) -> str:
        return self.detector.series[verdict.index]

    def _notes(self, step: int) -> tuple[str, ...]:
        known = ("after_resume",) if self._recent(step) else ()
        return (*known, self._regime.words) if self._regime.words else known

    def _recent(self, step: int) -> bool:
        """The run was resumed shortly before `step`."""
        return self._resumed >= 0 and step - self._resumed <= self.settings.after_resume

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; a Watch that loads it continues as if it had never stopped."""
        groups = {id: Episode(anomaly).state() for id, anomaly in self._groups.items()}
        return {
            "version": 1,
            "detector": self.detector.state_dict(),
            "open": {key: episode.state() for key, episode in self._open.items()},
            "periods": self._periods.state_dict(),
            "groups": groups,
            "amp_skips": self.amp_skips,
            "skipped": self._skipped,
            "resumed": self._resumed,
            "monitors": {name: monitor.state_dict() for name, monitor in self._monitors.items()},
            "rested": self._rested,
            "waiting": self._witness.state_dict(),
            "standing": self._standing.state_dict(),
            "aftermath": self._aftermath.state_dict(),
            "latest": self._latest.state() if self._latest is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state["detector"])
        self._open = {key: Episode.restore(value) for key, value in state["open"].items()}
        self._periods.load_state_dict(state["periods"])
        self._groups = {id: Episode.restore(value).anomaly for id, value in state["groups"].items()}
        self.amp_skips, self._skipped, self._resumed = state["amp_skips"], state["skipped"], state["resumed"]
        self._rested = state.get("rested", -1)
        self._witness.load_state_dict(state.get("waiting", {}))
        self._standing.load_state_dict(state.get("standing", {}))
        opened = {episode.anomaly.id: episode for episode in self._open.values()}
        self._aftermath.load_state_dict(state.get("aftermath", {}), opened)
        latest = state.get("latest")
        self._latest = Episode.restore(latest) if latest else None
        for name, kept in state.get("monitors", {}).items():  # absent in the state of an older version
            if name in self._monitors:
                self._monitors[name].load_state_dict(kept)
        self._plans.clear()
        self._columns()
