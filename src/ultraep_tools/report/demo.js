// The plots of the demo report.

function lines(data, byPolicy, more = {}) {
  return Object.entries(byPolicy).map(([name, values], place) =>
    line(data.step, values, name, policyColour(name, place), more));
}

// -- numbers -> [traces, layout] ----------------------------------------------------------------

const figures = {
  imbalance: imbalanceFigure,
  layers: layersFigure,
  copies: copiesFigure,

  replay(data) {
    const drawn = lines(data, data.imbalance);
    for (const trace of drawn) trace.line.dash = DASHES[trace.name] || "solid";
    return [
      drawn,
      { ...regions(data.domains), xaxis: stepAxis(data), yaxis: title("imbalance, mean of layers") },
    ];
  },

  loss(data) {
    const drawn = lines(data, data.losses, { hovertemplate: "%{y:.4f}" });
    drawn.forEach((trace, place) => {
      trace.line.width = place ? 2 : 5; // the first line stays visible below the others
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
    const placed = apart(0) ? oneAboveTheOther : (more) => more;
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
      placed({
        xaxis: { domain: [0, 0.44], ...title("first token: median, 90th percentile") },
        xaxis2: { domain: [0.56, 1], ...title("MoE layers alone"), anchor: "y2" },
        yaxis: title("ms"),
        yaxis2: { ...title("tokens/s"), anchor: "x2", range: [0, 1.08 * Math.max(forced, ...speeds)] },
        shapes: [even("x2 domain", forced, "y2")],
      }),
    ];
  },

  microbatches: microbatchFigure,
};

preparePicker();
drawAll();
