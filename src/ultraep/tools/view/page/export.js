// The plots of a trace in one file.

function wholeMap(data) {
  const most = data.z.flat().reduce((a, b) => Math.max(a, b ?? 1), 1 + 1e-9);
  return [[heatTrace(data.z, {
    x: data.step, y: data.layers, low: 1, high: most, words: "imbalance",
    hover: "layer %{y}, from %{x} on: %{z:.3f}<extra></extra>",
  })], {
    hovermode: "closest", margin: { l: 60, r: 12, t: 36, b: 56 },
    xaxis: { ...title(data.axis), showgrid: false, zeroline: false },
    yaxis: { ...title("layer"), type: "category", showgrid: false, autorange: "reversed" },
  }];
}

function flowsOfWorst({ list }) {
  const plot = find("plot-flows");
  plot.style.height = `${flowsHeight(list)}px`;
  return flowsFigure(list, plot.clientWidth);
}

function passOfWorst(one) {
  find(`plot-${one.name}`).style.height = `${stagesHeight(one)}px`;
  return stagesFigure(one);
}

const figures = {
  imbalance: imbalanceFigure, layers: layersFigure, copies: copiesFigure, time: timeFigure,
  before: wholeMap, after: wholeMap, microbatches: microbatchFigure,
  flows: flowsOfWorst, forward: passOfWorst, backward: passOfWorst,
};
for (const name of Object.keys(figures)) {
  if (!find(`plot-${name}`)) delete figures[name];
}
preparePicker();
drawAll();
