// One microbatch of one layer: ranks, replicas, stages.

let record = null, recordTurn = 0;

async function loadRecord() {
  if (route.step === undefined) return startRecord();
  const { trace, step, layer, microbatch } = route;
  const turn = ++recordTurn, data = await ask("record", { trace, step, layer, microbatch });
  if (turn !== recordTurn) return undefined;
  record = data;
  find("layer").replaceChildren(...data.around.layers.map((name) => new Option(name, name)));
  [find("step").value, find("microbatch").value, find("layer").value] = [step, microbatch, layer];
  parsed.ranks = data;
  find("plot-ranks").style.height = apart(data.homes.length) ? "640px" : "";
  draw("ranks");
  const passes = Object.values(data.stages).filter(Boolean);
  find("stage-words").textContent = passes.length
    ? "Colours show what a stage does: experts, messages, balancing, other."
    : "The trace has no stage times.";
  find("passes").replaceChildren();
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
  const { policy, replicas, unusable, speeds, bytes } = data;
  const sentences = [`Step ${route.step}, microbatch ${route.microbatch}, layer ${route.layer} (${policy}): ${words}`];
  if (bytes) sentences.push(`${sizeWords(bytes)} moved.`);
  if (unusable) sentences.push(`${counted(unusable, "replica")} in the trace name experts or ranks that do not exist.`);
  if (speeds) {
    const rank = speeds.indexOf(Math.min(...speeds));
    sentences.push(`Planned by the speed of every rank; rank ${rank} is the slowest, at ${speeds[rank] / 10} %.`);
  }
  if (data.predicted.length) {
    const [time, without] = data.predicted, alone = !replicas && data.after > 1;
    sentences.push(`Predicted time ${timeWords(time)}, without replicas ${timeWords(without)}` +
      `${alone ? ": replicas would cost more than they save" : ""}.`);
  }
  find("description").textContent = sentences.join(" ");
  return [figure, more];
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
  const layer = around.layers[around.layers.indexOf(Number(route.layer)) + layers];
  const from = around.moment + moments;
  if (layer === undefined || from < 0 || from >= around.moments) return;
  const { key } = await ask("worst", { trace: route.trace, layer, from, to: from + 1 });
  if (key) goToRecord(key);
  else showError(`layer ${layer} has no record there`);
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
