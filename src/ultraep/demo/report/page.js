// The plots of a demo.

// The kinds of text, as shaded regions with their names.
function regions(domains) {
  const edges = domains.map(({ begin, end }) => [begin - 0.5, end + 0.5]);
  return {
    shapes: edges.map(([x0, x1], place) => ({
      type: "rect", layer: "below", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1,
      line: { width: 0 }, fillcolor: place % 2 ? "rgba(0,0,0,0)" : css("shade"),
    })),
    annotations: domains.map(({ name }, place) => ({
      text: name, showarrow: false, xref: "x", yref: "paper", yanchor: "bottom", y: 1,
      x: (edges[place][0] + edges[place][1]) / 2, font: { color: css("soft") },
    })),
  };
}

function stepAxis({ step, steps_per_point: several }, more = {}) {
  const last = step[step.length - 1] + several - 0.5;
  return { ...title("training step"), range: [-0.5, last], showgrid: false, zeroline: false, ...more };
}

function lines(data, byPolicy, more = {}) {
  return Object.entries(byPolicy).map(([name, values], place) =>
    line(data.step, values, name, policyColour(name, place), more));
}

// -- the plots: numbers -> [traces, layout] -----------------------------------------------------

const figures = {
  imbalance(data) {
    return [
      [
        band(data.step, data.before, BEFORE),
        band(data.step, data.after, AFTER),
        line(data.step, data.before.mean, "without copies", BEFORE),
        line(data.step, data.after.mean, "with copies", AFTER),
      ],
      { ...regions(data.domains), xaxis: stepAxis(data), yaxis: title("imbalance; band: layers") },
    ];
  },

  layers(data) {
    const bar = (key, name, colour) => ({
      type: "bar", x: data.layer, y: data[key], name, marker: { color: colour },
      customdata: data[`${key}_worst`],
      hovertemplate: "%{y:.3f} (worst %{customdata:.3f})",
    });
    return [
      [bar("before", "without copies", BEFORE), bar("after", "with copies", AFTER)],
      {
        xaxis: { ...title("layer"), type: "category" },
        yaxis: title("imbalance, mean of steps"),
        shapes: [even("x domain", 1)],
      },
    ];
  },

  copies(data) {
    const mega = data.bytes.map((value) => (value === null ? null : value / 1e6));
    return [
      [
        band(data.step, data.copies, AFTER),
        line(data.step, data.copies.mean, "copies per layer", AFTER),
        line(data.step, mega, "MB moved per step", "#3d9970", { yaxis: "y2" }),
      ],
      {
        ...regions(data.domains),
        xaxis: stepAxis(data, { anchor: "y2" }),
        yaxis: { ...title("copies; band: layers"), domain: [0.55, 1], rangemode: "tozero" },
        yaxis2: { ...title("MB per step"), domain: [0, 0.45], rangemode: "tozero" },
      },
    ];
  },

  replay(data) {
    const drawn = lines(data, data.imbalance);
    for (const one of drawn) one.line.dash = DASHES[one.name] || "solid";
    return [
      drawn,
      { ...regions(data.domains), xaxis: stepAxis(data), yaxis: title("imbalance, mean of layers") },
    ];
  },

  loss(data) {
    const drawn = lines(data, data.losses, { hovertemplate: "%{y:.4f}" });
    drawn.forEach((one, place) => {
      one.line.width = place ? 2 : 5; // the first one stays visible under the others
    });
    return [drawn, { ...regions(data.domains), xaxis: stepAxis(data), yaxis: title("loss") }];
  },

  speed(data) {
    return [
      lines(data, data.tokens_per_second, { hovertemplate: "%{y:,.0f}" }),
      {
        ...regions(data.domains),
        xaxis: stepAxis(data),
        yaxis: { ...title("tokens/s, training"), rangemode: "tozero" },
      },
    ];
  },

  requests(data) {
    const colours = data.policy.map(policyColour);
    const { layer_tokens_per_second: speeds, forced_tokens_per_second: forced } = data;
    const bar = (key, factor, more) => ({
      type: "bar", x: data.policy, y: data[key].map((value) => value && value * factor),
      marker: { color: colours }, showlegend: false, ...more,
    });
    return [
      [
        bar("first_token_median", 1e3, { name: "median", hovertemplate: "%{y:,.0f} ms" }),
        bar("first_token_p90", 1e3, {
          name: "90th percentile", hovertemplate: "%{y:,.0f} ms",
          marker: { color: colours, opacity: 0.5 },
        }),
        bar("layer_tokens_per_second", 1, {
          name: "MoE layers", hovertemplate: "%{y:,.0f}", xaxis: "x2", yaxis: "y2",
        }),
      ],
      {
        xaxis: { domain: [0, 0.44], ...title("first token: median, 90th percentile") },
        xaxis2: { domain: [0.56, 1], ...title("MoE layers alone"), anchor: "y2" },
        yaxis: title("ms"),
        yaxis2: { ...title("tokens/s"), anchor: "x2", range: [0, 1.08 * Math.max(forced, ...speeds)] },
        shapes: [even("x2 domain", forced, "y2")],
      },
    ];
  },

  microbatches: microbatchFigure,
};

preparePicker();
drawAll();
