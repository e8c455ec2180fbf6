// The whole run: what balancing did, lines over time, layers, stages.

let overview = null;

async function loadOverview() {
  const { trace, from, to } = route;
  overview = await ask("overview", { trace, from, to });
  const { totals, lines, layers, stages } = overview, { policy } = item();
  showAnswer(overview);
  showRange(overview);
  find("drawn").hidden = !totals.records;
  if (!totals.records) return;
  parsed.imbalance = parsed.copies = parsed.time = { ...overview, ...lines, policy };
  parsed.layers = { ...layers, policy };
  find("timed").hidden = totals.lost === null;
  for (const name of ["imbalance", "layers", "copies", ...(totals.lost === null ? [] : ["time"])]) draw(name);
  find("stages").replaceChildren(table(["stage", "time"],
    Object.entries(stages).map(([name, seconds]) => [name, timeWords(seconds)])));
}

function showAnswer({ totals, unbalanced, unit }) {
  const { before, after, records, copies, bytes, lost } = totals;
  find("imbalance").textContent = records ? `Imbalance ${before.toFixed(2)} \u2192 ${after.toFixed(2)}` : "No records yet";
  find("net").textContent = records ? netWords(totals, unit) : "";
  const { name, ranks, experts, slots, policy, created, note } = item();
  find("facts").textContent = `${name}: policy ${policy}, ${counted(ranks, "rank")}, ${counted(experts, "expert")}, ` +
    `${counted(slots, "spare slot")} per rank. Recorded ${created}. ${note}`;
  const cards = records ? [
    ["worst imbalance", `${totals.before_worst.toFixed(2)} \u2192 ${totals.after_worst.toFixed(2)}`],
    ["replicas per layer", (copies / records).toFixed(1)],
    ...(bytes ? [[`bytes moved per ${unit}`, sizeWords(bytes / totals.moments)]] : []),
    ...(lost === null ? [] : [[`lost in experts per ${unit}`, timeWords(lost / totals.moments)]]),
    ["records", number(records) + (unbalanced ? `, without ${number(unbalanced)} of policy none` : "")],
  ] : [];
  find("cards").replaceChildren(...cards.map(([title, value]) => {
    const card = element("div");
    card.append(element("dt", title), element("dd", value));
    return card;
  }));
}

function netWords({ saved, cost, copies, moments }, unit) {
  if (item().policy === "none" && !copies) return "Not balanced: policy none.";
  if (saved === null) return "Time saved: unknown, the trace has no stage times.";
  const [gain, spent] = [saved / moments, (cost ?? 0) / moments];
  const net = gain >= spent ? `Net time saved: ${timeWords(gain - spent)} per ${unit}`
    : `Balancing costs ${timeWords(spent - gain)} per ${unit} more than it saves`;
  return `${net} (${timeWords(gain)} saved, ${timeWords(spent)} spent)`;
}

function showRange({ begin, end, moments, unit }) {
  find("range").hidden = begin === 0 && end === moments;
  find("part").textContent = `${counted(end - begin, unit)} of ${number(moments)}.`;
  find("whole").href = address({ from: null, to: null });
}

// Open the most imbalanced record of a range of moments, of one layer or of all.
async function openWorst(parameters = {}) {
  const { key } = await ask("worst", { trace: route.trace, ...parameters });
  if (key) goToRecord(key);
}

// Plotly emits events only after the first drawing.
function listen(name) {
  const plot = find(`plot-${name}`);
  if (plot.listened || !plot.on) return;
  plot.listened = true;
  plot.on("plotly_click", ({ points: [point] }) => clicked(name, point).catch(showError));
  if (name !== "layers" && !baked) plot.on("plotly_relayout", zoomed);
}

async function clicked(name, point) {
  if (name === "layers") return openWorst({ layer: point.x, from: overview.begin, to: overview.end });
  const from = overview.begin + overview.steps_per_point * point.pointIndex;
  return openWorst({ from, to: Math.min(from + overview.steps_per_point, overview.end) });
}

function zoomed(change) {
  const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (low === undefined) return;
  const at = (x) => overview.begin + overview.steps_per_point * overview.step.filter((step) => step < x).length;
  const from = Math.max(0, at(low)), to = Math.min(overview.moments, Math.max(from + 1, at(high)));
  go({ from, to });
}
