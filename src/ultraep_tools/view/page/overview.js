// The whole run: lines over time, layers, totals; and the map of layers over time.

let overview = null, heatData = null, cursor = [0, 0];

async function loadOverview() {
  const { trace, from, to } = route;
  const data = await ask("overview", { trace, from, to, points: 600 });
  overview = data;
  const policy = item().policy;
  parsed.imbalance = parsed.copies = parsed.time = { ...data, ...data.lines, policy };
  parsed.layers = { ...data.layers, policy };
  find("from").value = data.begin;
  find("to").value = data.end;
  find("from").max = find("to").max = data.moments;
  showCards(data);
  find("drawn").hidden = find("range").hidden = !data.totals.records;
  if (baked) find("range").hidden = true;
  if (!data.totals.records) return;
  showStages(data.stages);
  const timed = data.totals.lost !== null;
  find("plot-time").hidden = find("timed").hidden = !timed;
  find("unequal").hidden = !data.speeds;
  if (data.speeds) parsed.rankspeeds = { ...data, ...data.speeds, policy };
  const optional = [...(timed ? ["time"] : []), ...(data.speeds ? ["rankspeeds"] : [])];
  for (const name of ["imbalance", "layers", "copies", ...optional]) draw(name);
}

function showCards({ totals, unit, steps_per_point: each, moments }) {
  const perLayer = (total, words) => (totals.records ? `${words(total / totals.records)} per layer` : "");
  const cards = [
    ["records", number(totals.records), counted(moments, unit) + (each > 1 ? `; ${each} per point` : "")],
    ["imbalance without replicas", ratioWords(totals.before), `worst ${ratioWords(totals.before_worst)}`],
    ["imbalance with replicas", ratioWords(totals.after), `worst ${ratioWords(totals.after_worst)}`],
    ["replicas", totals.copies === null ? "-" : number(totals.copies), perLayer(totals.copies, (mean) => mean.toFixed(1))],
    ["bytes moved", totals.bytes ? sizeWords(totals.bytes) : "-",
      totals.bytes ? perLayer(totals.bytes, (mean) => sizeWords(Math.round(mean))) : "none recorded"],
    ["time lost in experts", timeWords(totals.lost), totals.lost === null ? "not recorded" : "slowest rank minus mean rank"],
    ["time saved in experts", timeWords(totals.saved), totals.saved === null ? "not recorded" : `${timeWords(totals.cost)} spent on it`],
  ];
  find("cards").replaceChildren(...cards.map(([name, value, more]) => {
    const card = element("div"), big = element("dd", value);
    big.append(element("small", more));
    card.append(element("dt", name), big);
    return card;
  }));
}

function showStages(stages) {
  const rows = Object.entries(stages).map(([name, seconds]) => [name, timeWords(seconds)]);
  find("stage-means").replaceChildren(...(rows.length
    ? [element("h2", "Stages"), element("p", "Mean time per record, on the rank with the largest mean."), table(["stage", "time"], rows)]
    : [element("p", "The trace has no stage times.", { class: "soft" })]));
}

// Open the most imbalanced record of a range of moments, of one layer or of all.
async function openWorst(parameters = {}) {
  const { key } = await ask("worst", { trace: route.trace, ...parameters });
  if (key) goToRecord(key);
}

function prepareOverview() {
  find("range").addEventListener("submit", (event) => {
    event.preventDefault();
    const [from, to] = [Number(find("from").value), Number(find("to").value)];
    go(to > from ? { from, to } : { from: to, to: from });
  });
  find("whole").addEventListener("click", () => go({ from: null, to: null }));
}

// Plotly emits events only after the first drawing.
function listen(name) {
  const plot = find(`plot-${name}`);
  if (plot.listened || !plot.on) return;
  plot.listened = true;
  plot.on("plotly_click", ({ points: [point] }) => clicked(name, point).catch(showError));
  if (name !== "layers" && name !== "map" && !baked) plot.on("plotly_relayout", zoomed);
}

async function clicked(name, point) {
  if (name === "layers") return openWorst({ layer: point.x, from: overview.begin, to: overview.end });
  if (name === "map") return openCell(point.pointIndex[1], point.pointIndex[0]);
  const begin = overview.begin + overview.steps_per_point * point.pointIndex;
  return openWorst({ from: begin, to: Math.min(begin + overview.steps_per_point, overview.end) });
}

function zoomed(change) {
  const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (low === undefined) return;
  const at = (x) => overview.begin + overview.steps_per_point * overview.step.filter((step) => step < x).length;
  const from = Math.max(0, at(low)), to = Math.min(overview.moments, Math.max(from + 1, at(high)));
  go({ from, to });
}

// -- the map -------------------------------------------------------------------------------------

const VALUE_WORDS = {
  before: ["imbalance", ratioWords], after: ["imbalance", ratioWords], copies: ["replicas", (v) => v.toFixed(1)],
  bytes: ["bytes", sizeWords], lost: ["seconds", timeWords], saved: ["seconds", timeWords], cost: ["seconds", timeWords],
};

async function loadMap() {
  const { trace, from, to, value = "before" } = route;
  const columns = Math.max(40, Math.min(300, Math.floor(find("plot-map").clientWidth / 4)));
  heatData = await ask("heat", { trace, from, to, value, columns });
  find("value").value = value;
  parsed.map = heatData;
  cursor = [Math.min(cursor[0], heatData.starts.length - 1), Math.min(cursor[1], heatData.layers.length - 1)];
  draw("map");
  showCell();
}

function mapFigure(data) {
  const known = data.z.flat().filter((value) => value !== null);
  const least = data.value === "before" || data.value === "after" ? 1 : known.reduce((a, b) => Math.min(a, b), 0);
  const most = known.reduce((a, b) => Math.max(a, b), least + 1e-9);
  const x = data.step, [column, layer] = cursor;
  const hover = data.z.map((row, place) => row.map((_, at) => cellWords(at, place)));
  const trace = heatTrace(data.z, {
    x, y: data.layers, low: least, high: most, words: VALUE_WORDS[data.value][0], hover: "%{text}<extra></extra>",
  });
  const half = data.starts.length > 1 ? (x[1] - x[0]) / 2 : 0.5;
  const frame = {
    type: "rect", x0: x[column] - half, x1: x[column] + half, y0: layer - 0.5, y1: layer + 0.5,
    line: { color: css("text"), width: 3 },
  };
  const inner = { ...frame, line: { color: css("back"), width: 1 } };
  return [[{ ...trace, text: hover }], {
    hovermode: "closest", margin: { l: 56, r: 12, t: 36, b: 56 }, shapes: x.length ? [frame, inner] : [],
    xaxis: { ...title(data.axis), showgrid: false, zeroline: false },
    yaxis: { ...title("layer"), type: "category", showgrid: false, autorange: "reversed" },
  }];
}

function cellWords(column, layer) {
  const { starts, steps_per_point: each, end, at, several, unit, z, layers, value } = heatData;
  const count = Math.min(each, end - starts[column]), [step, microbatch] = at[column];
  const place = `step ${step}${several ? `, microbatch ${microbatch}` : ""}`;
  const when = count > 1 ? `mean of ${counted(count, unit)} from ${place} on` : place;
  const mean = z[layer][column];
  return `layer ${layers[layer]}, ${when}: ${mean === null ? "no value" : VALUE_WORDS[value][1](mean)}`;
}

function showCell() {
  find("cell").textContent = heatData.starts.length ? cellWords(...cursor) : "There are no records yet.";
}

async function openCell(column, layer) {
  cursor = [column, layer];
  const begin = heatData.starts[column];
  return openWorst({
    layer: heatData.layers[layer], from: begin, to: Math.min(begin + heatData.steps_per_point, heatData.end),
  });
}

function prepareMap() {
  find("value").addEventListener("input", () => go({ value: find("value").value }));
  find("plot-map").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!heatData || !heatData.starts.length || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    if (!move) return void openCell(...cursor).catch(showError);
    const bound = (value, count) => Math.max(0, Math.min(value, count - 1));
    cursor = [bound(cursor[0] + move[0], heatData.starts.length), bound(cursor[1] + move[1], heatData.layers.length)];
    draw("map");
    showCell();
  });
}
