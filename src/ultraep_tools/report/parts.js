"use strict";
// Parts of plots. They compute only sums and ratios of the embedded numbers. `figures` maps the name
// of each plot to a function: numbers -> [traces, layout].

const numbers = (name) => JSON.parse(document.getElementById(`numbers-${name}`).textContent);
const find = (id) => document.getElementById(id);
const css = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// One colour language for all pages.
// Policies colour lines and bars of runs; a run without replicas has the colour of policy none.
const POLICIES = {
  none: "#8d949c", eplb: "#d0713a", lplb: "#9b72cf", quota: "#3d9970",
  ultraep: "#3b82d6",
};
const OTHERS = ["#7a8b3c", "#6b6fb0", "#2f6f8f", "#8a6d3b"]; // policies of the user
const BEFORE = POLICIES.none, AFTER = POLICIES.ultraep;
// Ranks colour experts and flows: by the home rank of the expert. Replicas are hatched.
const HOMES = [
  "#4e8fc7", "#5aa469", "#d98b4a", "#8f7ac0", "#bfa53a", "#c86f86", "#4aa3a8", "#98a1a8",
  "#8a9a4b", "#a87850",
];
// Kinds of work colour times and bytes.
const WORK = { experts: "#c2872e", messages: "#2f9e8f", balancing: "#b0569b", other: "#8d949c" };
const MOST_NAMED = 12; // experts in a sentence
const policyColour = (name) => POLICIES[name] || OTHERS[[...name].reduce((sum, c) => sum + c.charCodeAt(0), 0) % OTHERS.length];

function layout(more) {
  const axis = {
    gridcolor: css("grid"), linecolor: css("grid"), zerolinecolor: css("grid"), automargin: true,
  };
  const whole = {
    font: { family: "system-ui, sans-serif", size: 13, color: css("text") },
    paper_bgcolor: css("back"),
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 60, r: 12, t: 46, b: 80 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: css("back"), font: { color: css("text") } },
    legend: { orientation: "h", x: 0.5, xanchor: "center", yref: "container", y: 0.01, yanchor: "bottom" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("soft"), activecolor: css("text") },
    xaxis: axis,
    yaxis: axis,
  };
  for (const [key, value] of Object.entries(more)) {
    whole[key] = /^[xy]axis/.test(key) ? { ...axis, ...value } : value;
  }
  return whole;
}

function title(text) {
  return { title: { text, standoff: 8, font: { size: 13 } } };
}

function band(step, { min, max }, colour) {
  const there = step.map((_, place) => place).filter((place) => min[place] !== null);
  const back = [...there].reverse();
  return {
    x: [...there, ...back].map((place) => step[place]),
    y: [...there.map((place) => max[place]), ...back.map((place) => min[place])],
    fill: "toself", fillcolor: colour + "33", line: { width: 0 }, mode: "lines",
    hoverinfo: "skip", showlegend: false, type: "scatter",
  };
}

function line(x, y, name, colour, more = {}) {
  const hovertemplate = "%{y:.3f}";
  return { x, y, name, type: "scatter", mode: "lines", line: { color: colour }, hovertemplate, ...more };
}

function even(xref, y, yref = "y") {
  return {
    type: "line", xref, yref, x0: 0, x1: 1, y0: y, y1: y,
    line: { color: css("text"), width: 1, dash: "dash" },
  };
}

// -- one microbatch -----------------------------------------------------------------------------

// Ranks as bars, stacked by expert, without and with replicas; and a sentence.
function ranksFigure(data, record) {
  const [before, after] = blocks(data, record);
  const mean = sums(before).reduce((a, b) => a + b, 0) / data.homes.length;
  const most = Math.max(1, ...sums(before), ...sums(after));
  const ranks = { type: "category" };
  const placed = apart(data.homes.length) ? oneAboveTheOther : (more) => more;
  return [
    [...stacks(data, before, ""), ...stacks(data, after, "2")],
    placed({
      barmode: "stack", hovermode: "closest", showlegend: false, margin: { l: 60, r: 12, t: 36, b: 44 },
      xaxis: { ...ranks, domain: [0, 0.47], ...title("rank, without replicas") },
      xaxis2: { ...ranks, domain: [0.53, 1], ...title("rank, with replicas"), anchor: "y2" },
      yaxis: { ...title("rows (dashed: mean)"), range: [0, 1.04 * most] },
      yaxis2: { range: [0, 1.04 * most], showticklabels: false, anchor: "x2" },
      shapes: [even("x domain", mean), even("x2 domain", mean)],
    }),
    account(data, before, after),
  ];
}

// Whether there is no room for ranks without and with replicas beside each other.
const apart = (ranks) => document.documentElement.clientWidth < 600 || ranks > 32;

function oneAboveTheOther(more) {
  const { xaxis, xaxis2, yaxis, yaxis2 } = more;
  return {
    ...more,
    xaxis: { ...xaxis, domain: [0, 1] }, xaxis2: { ...xaxis2, domain: [0, 1] },
    yaxis: { ...yaxis, domain: [0.6, 1] }, yaxis2: { ...yaxis2, domain: [0, 0.4], showticklabels: true },
  };
}

// For every rank its blocks {expert, rows, copy}, without and with replicas.
function blocks(data, { loads, rows, held }) {
  const before = data.homes.map((experts) =>
    experts.map((expert) => ({ expert, rows: loads[expert], of: loads[expert], copy: false })));
  let slot = 0;
  const after = data.homes.map((experts, rank) => {
    const home = experts.map((expert) =>
      ({ expert, rows: rows[slot++], of: loads[expert], copy: false }));
    for (let spare = 0; spare < data.slots; spare++, slot++) {
      const expert = held[rank * data.slots + spare];
      if (expert >= 0) home.push({ expert, rows: rows[slot], of: loads[expert], copy: true });
    }
    return home;
  });
  return [before, after];
}

function sums(ranks) {
  return ranks.map((parts) => parts.reduce((sum, part) => sum + part.rows, 0));
}

// Home experts first, the largest block at the bottom; replicas on top.
function stacks(data, ranks, axis) {
  const homeOf = [];
  data.homes.forEach((experts, rank) => experts.forEach((expert) => (homeOf[expert] = rank)));
  const hue = ({ expert }) => HOMES[homeOf[expert] % HOMES.length];
  const bar = (x, parts, marker) => ({
    type: "bar", x, y: parts.map((part) => part.rows), xaxis: `x${axis}`, yaxis: `y${axis}`,
    text: parts.map((part, place) => words(part, homeOf[part.expert], x[place])),
    textposition: "none", hovertemplate: "%{text}<extra></extra>",
    marker: { ...marker, line: { width: 0 } }, // a border would hide blocks of few rows
  });
  // One trace for the largest block of all ranks, one for the second, ...: few traces draw fast.
  // Every second block is lighter, so that neighbours of one home rank differ.
  const layers = (blocks, marker) => {
    const traces = [];
    for (let place = 0; blocks.some((parts) => parts[place]); place++) {
      const x = blocks.flatMap((parts, rank) => (parts[place] ? [rank] : []));
      const parts = x.map((rank) => blocks[rank][place]);
      traces.push(bar(x, parts, marker(parts.map((part) => hue(part) + (place % 2 ? "b0" : "")))));
    }
    return traces;
  };
  const homes = ranks.map((parts) => parts.filter((part) => !part.copy));
  for (const parts of homes) parts.sort((a, b) => b.rows - a.rows);
  const copies = ranks.map((parts) => parts.filter((part) => part.copy));
  const hatched = (bgcolor) => ({
    pattern: { shape: "/", size: 7, fillmode: "replace", bgcolor, fgcolor: css("back"), fgopacity: 0.5 },
  });
  return [...layers(homes, (color) => ({ color })), ...layers(copies, hatched)];
}

function words({ expert, rows, of, copy }, home, rank) {
  const what = copy ? `replica of expert ${expert}, home rank ${home}` : `expert ${expert}, at home`;
  const share = of ? Math.round((100 * rows) / of) : 0;
  return `rank ${rank}: ${what}<br>${rows.toLocaleString("en")} rows, ${share} % of the expert's`;
}

// Ascending numbers as text: 0, 2-5.
function stretches(numbers) {
  const ranges = [];
  for (const number of numbers) {
    const last = ranges[ranges.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([from, to]) => (to > from + 1 ? `${from}-${to}` : to > from ? `${from}, ${to}` : from)).join(", ");
}

function account(data, before, after) {
  const ratio = (ranks) => {
    const all = sums(ranks), total = all.reduce((a, b) => a + b, 0);
    return total ? (Math.max(...all) * all.length) / total : 1;
  };
  const hosts = new Map(); // by expert
  after.forEach((parts, rank) => parts.filter((part) => part.copy).forEach(({ expert }) =>
    hosts.set(expert, [...(hosts.get(expert) || []), rank])));
  const copies = [...hosts].sort(([a], [b]) => a - b).map(([expert, ranks]) =>
    `${expert} on rank${ranks.length > 1 ? "s" : ""} ${stretches(ranks)}`);
  const count = [...hosts.values()].reduce((sum, ranks) => sum + ranks.length, 0);
  const named = copies.length <= MOST_NAMED ? `Replicas of expert ${copies.join(", expert ")}.` : `${count} replicas.`;
  return `imbalance ${ratio(before).toFixed(3)} without replicas, ${ratio(after).toFixed(3)} with. ` +
    (copies.length ? named : "No replicas.");
}

// -- drawing ------------------------------------------------------------------------------------

const parsed = {}; // by figure
const options = { responsive: true, displaylogo: false, displayModeBar: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

function draw(name) {
  parsed[name] = parsed[name] || numbers(name);
  const [traces, more] = figures[name](parsed[name]);
  return Plotly.react(find(`plot-${name}`), traces, layout(more), options);
}

// Whether a plot has numbers and is visible; the viewer hides some views.
function drawable(name) {
  const plot = find(`plot-${name}`);
  return plot && plot.offsetParent !== null && (parsed[name] || find(`numbers-${name}`));
}

function drawAll() {
  Object.keys(figures).filter(drawable).forEach(draw);
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
