// The plots of an inspection report.

const MOST = 4; // times the mean load; cells above it have the same colour

// All slot counts of a policy share a colour; more slots are more transparent.
function look(cases, { policy, slots }) {
  const names = [...new Set(cases.map((entry) => entry.policy))];
  const fewest = Math.min(...cases.filter((entry) => entry.policy === policy).map((entry) => entry.slots));
  return { color: policyColour(policy, names.indexOf(policy)), opacity: slots > fewest ? 0.55 : 1 };
}

// values: label of a case -> mean, worst and copies, each with one number per bar.
function caseBars(x, cases, values, more = () => ({})) {
  return cases.map((entry) => {
    const { mean, worst, copies } = values(entry.label);
    return {
      type: "bar", x, y: mean, name: entry.label, marker: look(cases, entry),
      customdata: worst.map((value, place) => [value, copies[place]]),
      hovertemplate: "%{y:.3f} (worst %{customdata[0]:.3f}), %{customdata[1]:.1f} replicas",
      ...more(entry),
    };
  });
}

// The numbers of one group of records at every number of ranks.
const bySize = (data, group) => (label) => {
  const column = (key) => data.values.map((cases) => cases[label][key][group]);
  return { mean: column("mean"), worst: column("worst"), copies: column("copies") };
};

const ratio = (text) => ({ ...title(text), rangemode: "tozero" });
const picked = (plot) => Number(find(`choice-${plot}`).value);

// One hue from light to dark (on a dark page, dark to light), readable without colours.
function heatTrace(z, { x, y, low, high, words, hover }) {
  return {
    type: "heatmap", z, x, y, zmin: low, zmax: high, xgap: 0, ygap: y.length > 60 ? 0 : 1, hoverongaps: false,
    colorscale: [[0, css("cell")], [0.5, AFTER], [1, css("text")]],
    colorbar: { thickness: 12, outlinewidth: 0, title: { text: words, side: "right", font: { size: 13 } } },
    hovertemplate: hover,
  };
}

const figures = {
  sizes(data) {
    const ranks = data.sizes.map((size) => `EP${size}`);
    return [
      caseBars(ranks, data.cases, bySize(data, 0)),
      { xaxis: { type: "category" }, yaxis: ratio("imbalance, mean"), shapes: [even("x domain", 1)] },
    ];
  },

  layers(data) {
    const values = data.values[picked("layers")];
    const drawn = data.cases.map((entry) => {
      const { color, opacity } = look(data.cases, entry);
      const { mean, worst } = values[entry.label];
      return line(data.names, mean, entry.label, color, {
        mode: "lines+markers", opacity, marker: { size: 5 }, customdata: worst,
        line: { color, dash: DASHES[entry.policy] || "solid" },
        hovertemplate: "%{y:.3f} (worst %{customdata:.3f})",
      });
    });
    return [drawn, { xaxis: { ...title("layer"), type: "category" }, yaxis: title("imbalance, mean of windows") }];
  },

  texts(data) {
    const values = data.values[picked("texts")];
    return [
      caseBars(data.names, data.cases, (label) => values[label]),
      { xaxis: { type: "category" }, yaxis: ratio("imbalance, mean"), shapes: [even("x domain", 1)] },
    ];
  },

  history(data) {
    const ranks = data.sizes.map((size) => `EP${size}`);
    const bars = (group, words, pattern) => caseBars(ranks, data.cases, bySize(data, group), (entry) => ({
      name: `${entry.label}: ${words}`,
      marker: { ...look(data.cases, entry), pattern: { shape: pattern, size: 7, fgcolor: css("back"), fillmode: "overlay" } },
    }));
    return [
      [...bars(0, "within a text", ""), ...bars(1, "after a change of text", "/")],
      { xaxis: { type: "category" }, yaxis: ratio("imbalance, mean"), shapes: [even("x domain", 1)] },
    ];
  },

  experts(data) {
    const load = data.load[picked("experts")];
    const top = Math.min(MOST, Math.max(1.5, ...load.flat()));
    return [
      [heatTrace(load, {
        y: data.layers, low: 0, high: top, words: "load / mean",
        hover: "layer %{y}, expert %{x}: %{z:.2f}<extra></extra>",
      })],
      {
        hovermode: "closest", margin: { l: 60, r: 12, t: 36, b: 48 },
        xaxis: { ...title("expert"), showgrid: false, zeroline: false },
        yaxis: { ...title("layer"), type: "category", showgrid: false, autorange: "reversed" },
      },
    ];
  },

  microbatches: microbatchFigure,
};
removeEmptySections();

function prepareChoice(plot, names) {
  const select = find(`choice-${plot}`);
  select.replaceChildren(...names.map((name, place) => new Option(name, place)));
  select.addEventListener("input", () => draw(plot));
}

prepareChoice("layers", numbers("layers").sizes);
prepareChoice("texts", numbers("texts").sizes);
prepareChoice("experts", numbers("experts").texts);
preparePicker();
drawAll();
