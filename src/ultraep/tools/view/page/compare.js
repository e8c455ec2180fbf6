// Two traces side by side, or a trace and its replay under other settings.

let compared = null, asked = 0;

function prepareCompare() {
  find("question").addEventListener("submit", (event) => {
    event.preventDefault();
    const fields = ["policy", "slots", "ranks", "history", "tolerance"];
    const values = Object.fromEntries(fields.map((name) => [name, find(name).value]));
    const other = find("other").value;
    const replay = other === "replay";
    const nothing = Object.fromEntries(fields.map((name) => [name, null]));
    go(replay ? { other, ...values } : { ...nothing, other });
  });
  find("other").addEventListener("input", showFields);
  find("stop").addEventListener("click", () => post(`/api/replays/${find("stop").value}/stop`, {}).catch(tell));
}

function showFields() {
  find("replayed").hidden = find("other").value !== "replay";
}

function fillCompare() {
  const mine = item();
  const others = state.items.filter(({ kind, error, number: own }) =>
    kind === "trace" && !error && String(own) !== route.trace);
  find("other").replaceChildren(
    new Option("itself, planned again", "replay"), ...others.map(({ number: own, name }) => new Option(name, own)),
  );
  find("policy").replaceChildren(...state.policies.map((name) => new Option(name, name)));
  find("other").value = route.other ?? "replay";
  find("policy").value = route.policy ?? "none";
  find("slots").placeholder = mine.slots;
  find("ranks").placeholder = mine.ranks;
  find("tolerance").placeholder = mine.tolerance;
  for (const name of ["slots", "ranks", "tolerance"]) find(name).value = route[name] ?? "";
  find("history").value = route.history ?? 1;
  showFields();
}

async function loadCompare() {
  const turn = ++asked;
  fillCompare();
  find("compared").hidden = find("done").hidden = find("stop").hidden = true;
  find("working").textContent = "";
  if (route.other === undefined) return;
  if (route.other !== "replay") {
    const [one, two] = await Promise.all([route.trace, route.other].map((trace) => ask("/api/overview", { trace })));
    if (turn !== asked) return;
    const name = state.items.find(({ number: own }) => String(own) === route.other).name;
    showCompared({ recorded: one, replayed: two, names: [item().name, name], others: true });
    return;
  }
  const optional = (name) => (route[name] ? { [name]: Number(route[name]) } : {});
  const question = {
    trace: Number(route.trace), policy: route.policy ?? "none",
    ...optional("slots"), ...optional("ranks"), ...optional("history"), ...optional("tolerance"),
  };
  await follow(await post("/api/replays", question), turn);
}

// Wait for a replay, and tell how far it is.
async function follow(job, turn) {
  while (job.state === "waiting" || job.state === "running") {
    find("done").hidden = find("stop").hidden = false;
    find("stop").value = job.number;
    find("done").value = job.total ? job.done / job.total : 0;
    find("working").textContent = job.state === "waiting" ? "Waits for another replay."
      : `Planned ${number(job.done)} of ${number(job.total)} records again.`;
    await new Promise((resolve) => setTimeout(resolve, 300));
    if (turn !== asked) return;
    job = await ask(`/api/replays/${job.number}`);
    if (turn !== asked) return;
  }
  find("done").hidden = find("stop").hidden = true;
  if (job.state === "failed") throw new Error(job.error);
  const { layers, all_layers: all, line } = job.answer;
  find("working").textContent = `${number(job.done)} records planned again` +
    (job.state === "stopped" ? ", then it was stopped" : "") +
    (layers.length < all ? `: ${layers.length} of ${all} layers, evenly spread` : "") +
    (line.beyond ? `; ${number(line.beyond)} plans need more slots than there are, or leave their domain` : "") + ".";
  const words = [line.policy, `EP${line.ranks}`, counted(line.slots, "slot"),
    ...(line.history ? [`history ${line.history}`] : [])];
  showCompared({ ...job.answer, names: ["as recorded", words.join(", ")] });
}

function showCompared(data) {
  compared = data;
  find("compared").hidden = false;
  parsed.both = parsed.bothlayers = data;
  const row = (name, { totals }) => [
    name, number(totals.records), ratioWords(totals.before), ratioWords(totals.after), ratioWords(totals.after_worst),
    totals.records ? (totals.copies / totals.records).toFixed(1) : "-", sizeWords(totals.bytes),
  ];
  find("table").replaceChildren(table(
    ["", "records", "without copies", "with copies", "worst", "copies a layer", "bytes"],
    [row(data.names[0], data.recorded), row(data.names[1], data.replayed)],
  ));
  draw("both");
  draw("bothlayers");
}

// Lines of two runs; where their lengths differ, both begin at the left.
function bothFigure({ recorded, replayed, names, others }) {
  const drawn = [[recorded, names[0], BEFORE, "dot"], [replayed, names[1], AFTER, "solid"]];
  const without = (one, name, color, dash) =>
    line(one.step, one.lines.before.mean, name, color, { line: { color, width: 1, dash } });
  return [
    [
      ...drawn.map(([one, , colour]) => band(one.step, one.lines.after, colour)),
      ...(others ? drawn.map(([one, name, color], place) =>
        without(one, `${name}, without copies`, color, place ? "longdashdot" : "dash"))
        : [without(recorded, "without copies", css("soft"), "dash")]),
      ...drawn.map(([one, name, color, dash]) => line(one.step, one.lines.after.mean, name, color, { line: { color, dash } })),
    ],
    { xaxis: { ...title(recorded.axis), showgrid: false }, yaxis: title("imbalance; band: layers") },
  ];
}

function bothLayersFigure({ recorded, replayed, names }) {
  const bar = ({ layers }, name, color, shape) => ({
    type: "bar", x: layers.layer, y: layers.after, name, customdata: layers.after_worst,
    marker: { color, pattern: { shape, size: 6, fgcolor: css("back"), fillmode: "overlay" } },
    hovertemplate: "%{y:.3f} (worst %{customdata:.3f})",
  });
  return [
    [bar(recorded, names[0], BEFORE, "/"), bar(replayed, names[1], AFTER, "")],
    { xaxis: { ...title("layer"), type: "category" }, yaxis: title("imbalance, mean"), shapes: [even("x domain", 1)] },
  ];
}
