// One microbatch of one layer: ranks, replicas, stages.

let record = null, recordTurn = 0;

async function loadRecord() {
  if (route.step === undefined) return startRecord();
  const { trace, step, layer, microbatch } = route;
  const turn = ++recordTurn, data = await ask("record", { trace, step, layer, microbatch });
  if (turn !== recordTurn) return undefined;
  record = data;
  const layers = find("layer");
  layers.replaceChildren(...data.around.layers.map((name) => new Option(name, name)));
  [find("step").value, find("microbatch").value, layers.value] = [step, microbatch, layer];
  parsed.ranks = data;
  find("plot-ranks").style.height = apart(data.ranks) ? "640px" : "";
  draw("ranks");
  showFlows(data.copies, data.bytes.reduce((a, b) => a + b, 0));
  find("passes").replaceChildren();
  const passes = Object.values(data.stages).filter(Boolean);
  find("no-stages").hidden = passes.length > 0;
  passes.forEach(showPass);
  return undefined;
}

// Without a record in the address, show the most imbalanced one.
async function startRecord() {
  const { key } = await ask("worst", { trace: route.trace });
  if (!key) return void (find("description").textContent = "There are no records yet.");
  return goToRecord(key, { replace: true });
}

function ranksWithWords(data) {
  const [figure, more, words] = ranksFigure(data, data);
  const where = `Step ${route.step}, microbatch ${route.microbatch}, layer ${route.layer} (${data.policy}): `;
  const moved = ` ${sizeWords(data.bytes.reduce((a, b) => a + b, 0))} moved.`;
  const wrong = data.unusable ? ` ${counted(data.unusable, "replica")} in the trace name experts or ranks that do not exist.` : "";
  find("description").textContent = where + words + moved + wrong + speedWords(data) + priceWords(data);
  return [figure, more];
}

function speedWords({ speeds }) {
  if (!speeds) return "";
  const slowest = Math.min(...speeds), fastest = Math.max(...speeds);
  return ` Planned by speeds: rank ${speeds.indexOf(slowest)} is the slowest, at ${(slowest / 10).toFixed(1)} %, ` +
    `rank ${speeds.indexOf(fastest)} the fastest, at ${(fastest / 10).toFixed(1)} %.`;
}

function priceWords({ priced, copies, after }) {
  if (!priced) return "";
  const alone = !copies.list.length && after > 1 ? ": replicas would cost more than they save" : "";
  return ` Predicted by the rates (${priced.rates} ps): ${timeWords(priced.time)}, ` +
    `without replicas ${timeWords(priced.without)}${alone}.`;
}

const MODE_WORDS = {
  direct: " (relay mode of the balancer).", chain: " (relay mode of the balancer).",
  auto: " (relay mode auto; on mapped memory the path can differ).",
  "": " (assumed: the trace does not contain the relay mode).",
};

function showFlows({ relay, mode, list }, moved) {
  const plot = find("plot-flows");
  plot.hidden = find("listed").hidden = !list.length;
  find("paths").textContent = !list.length ? "This microbatch has no replicas." :
    `${counted(list.length, "replica")}. ` +
    (relay === "chain" ? "Each host forwards the weights to the next" : "The home rank sends the weights to every host") +
    MODE_WORDS[mode] +
    (moved === 0 ? " No bytes were recorded: they were not counted, or the replicas were in their slots already." : "") +
    " The width shows the rows served by replicas. Flows between the same two ranks differ in shade, one per expert." +
    (wordsFit(list, find("view-record").clientWidth) ? "" : " Numbers are ranks, home ranks on the left.");
  if (!list.length) return;
  plot.style.height = `${flowsHeight(list)}px`;
  parsed.flows = list;
  draw("flows");
  find("copies").replaceChildren(table(
    ["expert", "path of its weights, by rank", "spare slot", "rows"],
    list.map(({ expert, path, slot, rows }) => [expert, path.join(" \u2192 "), slot, number(rows)]),
  ));
}

function showPass(pass) {
  const plot = element("div", undefined, {
    class: "plot", id: `plot-${pass.name}`, role: "img", "aria-label": `Stages of all ranks, ${pass.name}`,
  });
  plot.style.height = `${stagesHeight(pass)}px`;
  find("passes").append(element("h3", pass.name), plot);
  parsed[pass.name] = pass;
  figures[pass.name] = stagesFigure;
  draw(pass.name);
}

// Move by some moments and layers.
async function step(moments, layers) {
  if (!record) return;
  const { around } = record;
  const place = around.layers.indexOf(Number(route.layer)) + layers;
  const moment = around.moment + moments;
  if (place < 0 || place >= around.layers.length || moment < 0 || moment >= around.moments) return;
  const { key } = await ask("worst", {
    trace: route.trace, layer: around.layers[place], from: moment, to: moment + 1,
  });
  if (key) goToRecord(key);
  else showError(`layer ${around.layers[place]} has no record there`);
}

function prepareRecord() {
  find("which").addEventListener("submit", (event) => {
    event.preventDefault();
    go({ step: find("step").value, microbatch: find("microbatch").value || 0, layer: find("layer").value });
  });
  find("layer").addEventListener("input", () => go({ layer: find("layer").value }));
  find("previous").addEventListener("click", () => step(-1, 0).catch(showError));
  find("next").addEventListener("click", () => step(1, 0).catch(showError));
  find("worst").addEventListener("click", () => openWorst().catch(showError));
}
