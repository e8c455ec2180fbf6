// Several runs in the same figures: other traces, and a replay of this trace under other settings.

const SETTINGS = ["policy", "slots", "ranks", "history", "tolerance"];
const MOST_RUNS = 6, NO_RUNS = "-", BETWEEN = "|"; // in the entry `also` of the address
const RUN_DASHES = ["solid", "dash", "dashdot", "longdash", "dot"];
let comparison = 0;

function prepareCompare() {
  find("question").addEventListener("submit", (event) => {
    event.preventDefault();
    const also = [...find("runs").querySelectorAll("input:checked")].map(({ value }) => value);
    const values = Object.fromEntries(SETTINGS.map((name) => [name, find("policy").value ? find(name).value : null]));
    go({ also: also.join(BETWEEN) || NO_RUNS, ...values });
  });
  find("policy").addEventListener("input", showSettings);
  find("stop").addEventListener("click", () => ask("stop", { number: find("stop").value }).catch(showError));
}

function showSettings() {
  find("settings").hidden = !find("policy").value;
}

// The other runs and the policy of the replay, from the address or by default: the other traces of
// the same ranks and experts; if there are none, a replay.
function chosenRuns() {
  const mine = item(), others = traces().filter(({ name, error }) => !error && name !== mine.name);
  if (route.also === undefined && route.policy === undefined) {
    const comparable = others.filter(({ ranks, experts }) => ranks === mine.ranks && experts === mine.experts);
    const replay = mine.policy === "eplb" ? "ultraep" : "eplb";
    return [others, comparable.slice(0, MOST_RUNS - 1), comparable.length || !mine.records ? "" : replay];
  }
  const names = (route.also ?? "").split(BETWEEN);
  return [others, others.filter(({ name }) => names.includes(name)), route.policy ?? ""];
}

function fillCompare([others, chosen, policy]) {
  const mine = item();
  find("runs").hidden = !others.length;
  find("runs").replaceChildren(...others.map((other) => {
    const label = element("label"), box = element("input", undefined, { type: "checkbox", value: other.name });
    box.checked = chosen.includes(other);
    label.append(box, ` ${other.name}`);
    return label;
  }));
  find("policy").replaceChildren(new Option("no replay", ""), ...state.policies.map((name) => new Option(name, name)));
  find("policy").value = policy;
  for (const name of ["slots", "ranks", "tolerance"]) {
    find(name).placeholder = mine[name];
    find(name).value = route[name] ?? "";
  }
  find("history").value = route.history ?? 1;
  showSettings();
}

async function loadCompare() {
  const turn = ++comparison;
  const [others, chosen, policy] = chosenRuns();
  fillCompare([others, chosen, policy]);
  find("compared").hidden = find("done").hidden = find("stop").hidden = true;
  find("working").textContent = "";
  const runs = await Promise.all([item(), ...chosen].map(async ({ name, policy: own }) => ({
    name, policy: own, data: await ask("overview", { trace: name }), training: await ask("training", { trace: name }),
  })));
  if (turn !== comparison) return;
  showRuns(runs);
  if (!policy) return;
  const settings = Object.fromEntries(SETTINGS.slice(1).map((name) => [name, route[name]]));
  const answer = await replayed(await ask("replay", { trace: route.trace, policy, ...settings }), turn);
  if (!answer) return;
  const { ranks, slots, history } = answer.settings;
  const name = [`replay: ${policy}`, `EP${ranks}`, counted(slots, "slot"), ...(history ? [`history ${history}`] : [])].join(", ");
  runs[0].data = answer.recorded;
  showRuns([...runs, { name, policy, data: answer.replayed, training: {} }]);
}

// Wait for a replay and show its progress; undefined if another view was opened meanwhile.
async function replayed(job, turn) {
  while (job.state === "waiting" || job.state === "running") {
    find("done").hidden = find("stop").hidden = false;
    find("stop").value = job.number;
    find("done").value = job.total ? job.done / job.total : 0;
    find("working").textContent = job.state === "waiting" ? "Waiting for another replay."
      : `Replanned ${number(job.done)} of ${counted(job.total, "record")}.`;
    await new Promise((resolve) => setTimeout(resolve, 300));
    if (turn !== comparison) return undefined;
    job = await ask("replay", { number: job.number });
    if (turn !== comparison) return undefined;
  }
  find("done").hidden = find("stop").hidden = true;
  if (job.state === "failed") throw new Error(job.error);
  const { layers, all_layers: all, beyond } = job.answer;
  find("working").textContent = `Replanned ${counted(job.done, "record")}` +
    (job.state === "stopped" ? ", then stopped" : "") +
    (layers < all ? `, of ${layers} of ${all} layers, evenly spaced` : "") +
    (beyond ? `; ${counted(beyond, "plan")} would need more slots than there are, or leave their domain` : "") + ".";
  return job.answer;
}

// -- figures -------------------------------------------------------------------------------------

function showRuns(runs) {
  const counts = {};
  for (const run of runs) { // runs of one policy share its colour and differ in their dashes
    const place = (counts[run.policy] = (counts[run.policy] ?? -1) + 1);
    run.line = { color: policyColour(run.policy), dash: RUN_DASHES[place % RUN_DASHES.length] };
    run.shape = ["", "/", "\\", "x", "."][place % 5];
  }
  find("compared").hidden = false;
  find("table").replaceChildren(table(
    ["", "policy", "records", "without replicas", "with replicas", "worst", "replicas per layer", "bytes"],
    runs.map(({ name, policy, data: { totals } }) => [
      name, policy, number(totals.records), ratioWords(totals.before), ratioWords(totals.after), ratioWords(totals.after_worst),
      totals.records ? (totals.copies / totals.records).toFixed(1) : "-", sizeWords(totals.bytes),
    ]),
  ));
  const trained = runs.filter(({ training }) => training.loss);
  find("trained").hidden = !trained.length;
  for (const name of ["runs", "runlayers"]) parsed[name] = runs;
  for (const name of ["speed", "loss"]) parsed[name] = trained;
  for (const name of ["runs", "runlayers", ...(trained.length ? ["speed", "loss"] : [])]) draw(name);
}

function runsFigure(runs) {
  const [{ data }] = runs;
  return [
    [
      ...runs.map((run) => band(run.data.step, run.data.lines.after, run.line.color)),
      line(data.step, data.lines.before.mean, `${runs[0].name}, without replicas`, BEFORE, { line: { color: BEFORE, dash: "dot", width: 1 } }),
      ...runs.map((run) => line(run.data.step, run.data.lines.after.mean, run.name, run.line.color, { line: run.line })),
    ],
    { xaxis: { ...title(data.axis), showgrid: false }, yaxis: title("imbalance; band: layers") },
  ];
}

function runLayersFigure(runs) {
  return [
    runs.map(({ name, data: { layers }, line: { color }, shape }) => ({
      type: "bar", x: layers.layer, y: layers.after, name, customdata: layers.after_worst,
      marker: { color, pattern: { shape, size: 6, fgcolor: css("back"), fillmode: "overlay" } },
      hovertemplate: "%{y:.3f} (worst %{customdata:.3f})",
    })),
    { xaxis: { ...title("layer"), type: "category" }, yaxis: title("imbalance, mean"), shapes: [even("x domain", 1)] },
  ];
}

const trainingFigure = (key, words, hovertemplate, axis = {}) => (runs) => [
  runs.map(({ name, training, line: own }, place) => // the first line stays visible under the others
    line(training[key].map((_, step) => step), training[key], name, own.color,
      { line: { ...own, width: place ? 2 : 5 }, hovertemplate })),
  { xaxis: { ...title("training step"), showgrid: false }, yaxis: { ...title(words), ...axis } },
];
