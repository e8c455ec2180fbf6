// The run as a whole: lines over time, layers, sums; and the map of layers and time.

let overview = null, heatData = null, cursor = [0, 0];

async function loadOverview() {
  const { trace, from, to } = route;
  const found = await ask("/api/overview", { trace, from, to, points: 600 });
  overview = found;
  const unit = found.several ? "microbatch" : "step";
  const shared = { step: found.step, steps_per_point: found.steps_per_point, axis: found.axis, domains: [], unit };
  parsed.imbalance = parsed.copies = parsed.time = { ...shared, ...found.lines };
  parsed.layers = found.layers;
  find("from").value = found.begin;
  find("to").value = found.end;
  find("from").max = find("to").max = found.moments;
  showCards(found);
  find("drawn").hidden = find("stretch").hidden = !found.totals.records;
  if (!found.totals.records) return;
  showStages(found.stages);
  for (const name of ["imbalance", "layers", "copies", "time"]) draw(name);
  find("plot-time").hidden = found.totals.lost === null;
  find("timed").hidden = found.totals.lost === null;
}

function showCards({ totals, several, steps_per_point: each, complete, moments }) {
  const missing = complete ? "none recorded" : "not read yet";
  const cards = [
    ["records", number(totals.records), `${number(moments)} ${several ? "microbatches" : "steps"}` +
      (each > 1 ? `; a point stands for ${each}` : "")],
    ["imbalance without copies", ratioWords(totals.before), `worst ${ratioWords(totals.before_worst)}`],
    ["imbalance with copies", ratioWords(totals.after), complete ? `worst ${ratioWords(totals.after_worst)}` : missing],
    ["copies", totals.copies === null ? "-" : number(totals.copies),
      totals.records ? `${(totals.copies / totals.records).toFixed(1)} a layer` : ""],
    ["bytes moved", totals.bytes ? sizeWords(totals.bytes) : "-", !totals.bytes ? missing :
      `${sizeWords(Math.round(totals.bytes / totals.records))} a layer`],
    ["time lost in experts", timeWords(totals.lost), totals.lost === null ? missing : "slowest rank above the mean rank"],
    ["time saved in experts", timeWords(totals.saved), totals.saved === null ? missing : `${timeWords(totals.cost)} spent on it`],
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
  const told = rows.length
    ? [element("h2", "Stages"), element("p", "Mean per record, on the rank with the largest mean."), table(["stage", "time"], rows)]
    : [element("p", "No stage times were recorded, or they have not been read yet.", { class: "soft" })];
  find("stages-told").replaceChildren(...told);
}

// The most uneven record of some moments, perhaps of one layer only.
async function openWorst(parameters = {}) {
  const { key } = await ask("/api/worst", { trace: route.trace, ...parameters });
  if (key) go({ view: "record", step: key[0], layer: key[1], microbatch: key[2] });
}

function prepareOverview() {
  find("stretch").addEventListener("submit", (event) => {
    event.preventDefault();
    const [from, to] = [Number(find("from").value), Number(find("to").value)];
    go(to > from ? { from, to } : { from: to, to: from });
  });
  find("whole").addEventListener("click", () => go({ from: null, to: null }));
}

// Plotly knows its events once something is drawn.
function listen(name) {
  const plot = find(`plot-${name}`);
  if (plot.listened || !plot.on) return;
  plot.listened = true;
  plot.on("plotly_click", ({ points: [point] }) => clicked(name, point).catch(tell));
  if (name !== "layers" && name !== "map") plot.on("plotly_relayout", (change) => zoomed(change));
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
  before: ["imbalance", ratioWords], after: ["imbalance", ratioWords], copies: ["copies", (v) => v.toFixed(1)],
  bytes: ["bytes", sizeWords], lost: ["seconds", timeWords], saved: ["seconds", timeWords], cost: ["seconds", timeWords],
};

async function loadMap() {
  const { trace, from, to, value = "before" } = route;
  const columns = Math.max(40, Math.min(300, Math.floor(find("plot-map").clientWidth / 4)));
  heatData = await ask("/api/heat", { trace, from, to, value, columns });
  find("value").value = value;
  parsed.map = heatData;
  cursor = [Math.min(cursor[0], heatData.starts.length - 1), Math.min(cursor[1], heatData.layers.length - 1)];
  draw("map");
  tellCell();
}

function mapFigure(data) {
  const known = data.z.flat().filter((value) => value !== null);
  const least = data.value === "before" || data.value === "after" ? 1 : Math.min(0, ...[known.reduce((a, b) => Math.min(a, b), 0)]);
  const most = known.reduce((a, b) => Math.max(a, b), least + 1e-9);
  const x = data.step;
  const hover = data.z.map((row, layer) => row.map((value, column) => cellWords(column, layer)));
  const trace = heatTrace(data.z, {
    x, y: data.layers, low: least, high: most, words: VALUE_WORDS[data.value][0], hover: "%{text}<extra></extra>",
  });
  const half = data.starts.length > 1 ? (x[1] - x[0]) / 2 : 0.5;
  const [column, layer] = cursor;
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
  const { starts, steps_per_point: each, end, at, several, z, layers, value } = heatData;
  const count = Math.min(each, end - starts[column]), [step, microbatch] = at[column];
  const place = `step ${step}${several ? `, microbatch ${microbatch}` : ""}`;
  const when = count > 1 ? `mean of ${count} ${several ? "microbatches" : "steps"} from ${place} on` : place;
  const found = z[layer][column];
  return `layer ${layers[layer]}, ${when}: ${found === null ? "nothing" : VALUE_WORDS[value][1](found)}`;
}

function tellCell() {
  find("cell").textContent = heatData.starts.length ? cellWords(...cursor) : "Nothing is known yet.";
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
    if (!move) return void openCell(...cursor).catch(tell);
    const bound = (value, count) => Math.max(0, Math.min(value, count - 1));
    cursor = [bound(cursor[0] + move[0], heatData.starts.length), bound(cursor[1] + move[1], heatData.layers.length)];
    draw("map");
    tellCell();
  });
}
