// Several runs in the same figures.

const MOST_RUNS = 6, SAME_LOSS = 1e-3; // the largest relative difference that counts as rounding
const RUN_DASHES = ["solid", "dash", "dashdot", "longdash", "dot"];

// The traces that can be compared with the current one: of as many ranks and experts.
function comparable() {
  const own = item() ?? firstTrace();
  return traces().filter(({ error, records, ranks, experts }) =>
    !error && records && ranks === own.ranks && experts === own.experts).slice(0, MOST_RUNS);
}

async function loadCompare() {
  const counts = {};
  const runs = await Promise.all(comparable().map(async ({ name, policy }) => {
    const data = await ask("overview", { trace: name });
    const place = (counts[policy] = (counts[policy] ?? -1) + 1); // runs of one policy share its colour
    const label = name === policy ? name : `${name} (${policy})`;
    return { label, policy, data, line: { color: policyColour(policy), dash: RUN_DASHES[place % RUN_DASHES.length] } };
  }));
  const base = runs.find(({ policy }) => policy === "none") ?? runs[0];
  const others = runs.filter((run) => run !== base);
  const best = others.find(({ policy }) => policy === "ultraep") ?? others[0];
  if (!best) throw new Error("there is no other trace with the same number of ranks and experts");
  find("verdict").textContent = gainWords(base.data, best.data);
  find("against").textContent = `${best.label} compared with ${base.label}`;
  showRuns(runs, base);
}

// What a run gained over another, by what both traces contain.
function gainWords(base, run) {
  const [own, other] = [run.training, base.training];
  if (own.loss && other.loss) {
    const speed = middle(own.tokens_per_second) / middle(other.tokens_per_second);
    return `${speed.toFixed(2)}x training speed${lossWords(other.loss, own.loss)}`;
  }
  const layers = speedup(base, run);
  const imbalance = `imbalance ${base.totals.after.toFixed(2)} \u2192 ${run.totals.after.toFixed(2)}`;
  return layers === null ? imbalance : `MoE layers ${layers.toFixed(2)}x as fast, ${imbalance}`;
}

function lossWords(base, loss) {
  if (base.length !== loss.length) return "";
  const last = (values) => values.slice(-Math.max(1, Math.floor(values.length / 10))).reduce((a, b) => a + b, 0);
  const apart = Math.abs(last(loss) / last(base) - 1);
  return apart <= SAME_LOSS ? ", same loss" : `, losses ${(100 * apart).toPrecision(2)} % apart`;
}

const middle = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const speedup = ({ rows_per_second: base }, { rows_per_second: own }) => (base && own ? own / base : null);

function showRuns(runs, base) {
  find("table").replaceChildren(table(
    ["", "imbalance", "worst", "speed of MoE layers", "replicas per layer", "bytes"],
    runs.map(({ label, data }) => {
      const { totals } = data, gain = speedup(base.data, data);
      return [
        label, `${totals.before.toFixed(3)} \u2192 ${totals.after.toFixed(3)}`, totals.after_worst.toFixed(3),
        gain === null ? "-" : `${gain.toFixed(2)}x`, (totals.copies / totals.records).toFixed(1), sizeWords(totals.bytes),
      ];
    }),
  ));
  const trained = runs.filter(({ data }) => data.training.loss);
  find("trained").hidden = !trained.length;
  parsed.runs = parsed.runlayers = runs;
  parsed.speed = parsed.loss = trained;
  for (const name of ["runs", "runlayers", ...(trained.length ? ["speed", "loss"] : [])]) draw(name);
}

function runsFigure(runs) {
  const [{ data }] = runs;
  return [
    [
      ...runs.map((run) => band(run.data.step, run.data.lines.after, run.line.color)),
      ...runs.map((run) => line(run.data.step, run.data.lines.after.mean, run.label, run.line.color, { line: run.line })),
    ],
    { xaxis: { ...title(data.axis), showgrid: false }, yaxis: title("imbalance; band: layers") },
  ];
}

function runLayersFigure(runs) {
  return [
    runs.map(({ label, data: { layers }, line: { color } }) => ({
      type: "bar", x: layers.layer, y: layers.after, name: label, customdata: layers.after_worst, marker: { color },
      hovertemplate: "%{y:.3f} (worst %{customdata:.3f})",
    })),
    { xaxis: { ...title("layer"), type: "category" }, yaxis: title("imbalance, mean"), shapes: [even("x domain", 1)] },
  ];
}

const trainingFigure = (key, words, hovertemplate, axis = {}) => (runs) => [
  runs.map(({ label, data: { training }, line: own }, place) => // the first line stays visible under the others
    line(training[key].map((_, step) => step), training[key], label, own.color,
      { line: { ...own, width: place ? 2 : 5 }, hovertemplate })),
  { xaxis: { ...title("training step"), showgrid: false }, yaxis: { ...title(words), ...axis } },
];
