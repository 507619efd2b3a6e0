// What all charts share: the visible steps, the step under the cursor, the anomalies.

const view = {
  range: null,  // [first, last], null: everything
  step: null,
  listeners: [],

  onChange(listener) { this.listeners.push(listener); },

  zoom(range) {
    if (range && range[0] === this.range?.[0] && range[1] === this.range?.[1]) return;
    this.range = range;
    this.tell("range");
  },

  point(step) {
    if (step === this.step) return;
    this.step = step;
    this.tell("step");
  },

  tell(what) { for (const listener of this.listeners) listener(what); },
};
