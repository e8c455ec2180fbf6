// Figures of the viewer: numbers -> [traces, layout].

function stepAxis({ step, steps_per_point: several, axis = "training step" }, more = {}) {
  const range = step.length ? [step[0] - 0.5, step[step.length - 1] + several - 0.5] : [-0.5, 0.5];
  return { ...title(axis), range, showgrid: false, zeroline: false, ...more };
}

// -- over time and by layer ---------------------------------------------------------------------

// The colour of a run with replicas.
const withColour = ({ policy = "ultraep" }) => (policy === "none" ? AFTER : policyColour(policy));

function imbalanceFigure(data) {
  return [
    [
      band(data.step, data.before, BEFORE),
      band(data.step, data.after, withColour(data)),
      line(data.step, data.before.mean, "without replicas", BEFORE, { line: { color: BEFORE, dash: "dot" } }),
      line(data.step, data.after.mean, "with replicas", withColour(data)),
    ],
    { xaxis: stepAxis(data), yaxis: title("imbalance; band: layers") },
  ];
}

function layersFigure(data) {
  const bar = (key, name, colour, shape) => ({
    type: "bar", x: data.layer, y: data[key], name,
    marker: { color: colour, pattern: { shape, size: 6, fgcolor: css("back"), fillmode: "overlay" } },
    customdata: data[`${key}_worst`],
    hovertemplate: "%{y:.3f} (worst %{customdata:.3f})",
  });
  return [
    [bar("before", "without replicas", BEFORE, "/"), bar("after", "with replicas", withColour(data), "")],
    {
      xaxis: { ...title("layer"), type: "category" },
      yaxis: title("imbalance, mean of steps"),
      shapes: [even("x domain", 1)],
    },
  ];
}

function copiesFigure(data) {
  const most = data.bytes.reduce((a, b) => Math.max(a, b || 0), 0);
  const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  const [factor, unit] = units.find(([size]) => most >= size) || [1, "bytes"];
  const moved = data.bytes.map((value) => (value === null ? null : value / factor));
  return [
    [
      band(data.step, data.copies, withColour(data)),
      line(data.step, data.copies.mean, "replicas per layer", withColour(data)),
      line(data.step, moved, `${unit} moved per ${data.unit || "step"}`, WORK.balancing,
        { yaxis: "y2", line: { color: WORK.balancing, dash: "dash" } }),
    ],
    {
      xaxis: stepAxis(data, { anchor: "y2" }),
      yaxis: { ...title("replicas; band: layers"), domain: [0.55, 1], rangemode: "tozero" },
      yaxis2: { ...title(`${unit} per ${data.unit || "step"}`), domain: [0, 0.45], rangemode: "tozero" },
    },
  ];
}

// Seconds of all layers of a moment: saved by replicas, spent on them, still lost.
function timeFigure(data) {
  const ms = (values) => values.map((value) => (value === null ? null : 1e3 * value));
  const hovertemplate = "%{y:.3f} ms";
  return [
    [
      line(data.step, ms(data.saved), "saved in experts", withColour(data), { hovertemplate }),
      line(data.step, ms(data.cost), "spent on balancing", WORK.balancing,
        { hovertemplate, line: { color: WORK.balancing, dash: "dash" } }),
      line(data.step, ms(data.lost), "still lost in experts", BEFORE,
        { hovertemplate, line: { color: BEFORE, dash: "dot" } }),
    ],
    { xaxis: stepAxis(data), yaxis: { ...title("ms, all layers"), rangemode: "tozero" } },
  ];
}

// -- stages of all ranks -------------------------------------------------------------------------

// A stage has the colour of its kind of work and a pattern of its own. A backward stage looks like
// the forward stage that it reverses or repeats.
const STAGES = {
  experts: ["experts", ""], "experts back": ["experts", ""], recompute: ["experts", "/"],
  dispatch: ["messages", ""], "dispatch back": ["messages", ""], combine: ["messages", "\\"], "combine back": ["messages", "\\"],
  plan: ["balancing", ""], verify: ["balancing", "."], replicate: ["balancing", "/"], "weights again": ["balancing", "/"],
  reduce: ["balancing", "x"],
  loads: ["other", ""], reroute: ["other", "/"], attention: ["other", "-"], "attention back": ["other", "-"],
};

// Forward or backward of one microbatch: a row per rank.
function stagesFigure({ stages, begin, seconds }) {
  const ranks = begin.map((_, rank) => rank);
  const traces = stages.flatMap((name, place) => {
    const busy = ranks.map((rank) => 1e3 * (seconds[rank][place] || 0));
    if (!busy.some((value) => value > 0)) return [];
    const base = ranks.map((rank) => (begin[rank][place] === null ? null : 1e3 * begin[rank][place]));
    const [work, shape] = STAGES[name] || ["other", "+"], color = WORK[work];
    const pattern = { shape, size: 6, fgcolor: css("back"), fillmode: "overlay" };
    return [{
      type: "bar", orientation: "h", y: ranks, x: busy, base, name, legendgroup: name,
      hovertemplate: `rank %{y}: ${name} %{x:.3f} ms<extra></extra>`,
      marker: { color, pattern, line: { width: 0 } }, width: 0.8,
    }];
  });
  return [traces, {
    barmode: "overlay", hovermode: "closest",
    xaxis: { ...title("ms since the first rank began"), rangemode: "tozero" },
    yaxis: { ...title("rank"), autorange: "reversed", type: "category", showgrid: false },
    margin: { l: 56, r: 12, t: 36, b: 100 },
  }];
}

const stagesHeight = ({ begin }) => Math.min(1400, Math.max(240, 13 * begin.length + 170));
