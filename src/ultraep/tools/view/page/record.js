// One microbatch of one layer: ranks, copies, stages.

let record = null, recordTurn = 0;

async function loadRecord() {
  if (route.step === undefined) return startRecord();
  const { trace, step, layer, microbatch } = route;
  const key = { trace, step, layer, microbatch };
  const turn = ++recordTurn, found = await ask("/api/record", key);
  if (turn !== recordTurn) return undefined;
  record = found;
  const layers = find("layer");
  layers.replaceChildren(...found.around.layers.map((name) => new Option(name, name)));
  [find("step").value, find("microbatch").value, layers.value] = [step, microbatch, layer];
  parsed.ranks = found;
  find("plot-ranks").style.height = apart(found.ranks) ? "640px" : "";
  draw("ranks");
  showFlows(found.copies, found.bytes.reduce((a, b) => a + b, 0));
  find("passes").replaceChildren();
  find("no-stages").textContent = "No times were recorded.";
  const { forward, backward } = await ask("/api/stages", key);
  if (turn !== recordTurn) return undefined;
  for (const pass of [forward, backward]) if (pass) showPass(pass);
  find("no-stages").hidden = find("passes").childElementCount > 0;
  return undefined;
}

// Without a record in the address: the most uneven one.
async function startRecord() {
  const { key } = await ask("/api/worst", { trace: route.trace });
  if (!key) return void (find("told").textContent = "Nothing is recorded yet.");
  return go({ step: key[0], layer: key[1], microbatch: key[2] }, { replace: true });
}

function ranksWithWords(found) {
  const [traces, more, told] = ranksFigure(found, found);
  const where = `Step ${route.step}, microbatch ${route.microbatch}, layer ${route.layer} (${found.policy}): `;
  const moved = found.bytes.reduce((a, b) => a + b, 0);
  const also = ` ${sizeWords(moved)} moved.`;
  const wrong = found.unusable ? ` ${number(found.unusable)} of its copies name experts or ranks that do not exist.` : "";
  find("told").textContent = where + told + also + wrong + priceWords(found);
  return [traces, more];
}

function priceWords({ priced, copies, after }) {
  if (!priced) return "";
  const alone = !copies.list.length && after > 1 ? ": no copies would pay" : "";
  return ` By its rates (${priced.rates} ps) it takes ${timeWords(priced.time)}, ` +
    `without copies ${timeWords(priced.without)}${alone}.`;
}

const WAYS = {
  direct: " as the balancer was told.", chain: " as the balancer was told.",
  auto: " as balancers choose by themselves.",
  "": " as balancers choose by themselves; this trace does not tell how weights were to be sent.",
};

function showFlows({ relay, told, list }, moved) {
  const plot = find("plot-flows");
  plot.hidden = find("listed").hidden = !list.length;
  find("ways").textContent = !list.length ? "No copies were made." :
    `${list.length === 1 ? "One copy" : `${number(list.length)} copies`}, ` +
    (relay === "chain" ? "passed on from copy to copy," : "each sent by its home,") + WAYS[told] +
    (moved === 0 ? " No bytes were counted: nobody did, or the copies were there already." : "") +
    " As wide as the tokens that are served elsewhere." +
    (wordsFit(list, find("view-record").clientWidth) ? "" : " Numbers are ranks, home at the left.");
  if (!list.length) return;
  plot.style.height = `${flowsHeight(list)}px`;
  parsed.flows = list;
  draw("flows");
  find("copies").replaceChildren(table(
    ["expert", "way of its weights, by ranks", "spare slot", "tokens"],
    list.map(({ expert, way, slot, tokens }) => [expert, way.join(" \u2192 "), slot, number(tokens)]),
  ));
}

function showPass(one) {
  const plot = element("div", undefined, {
    class: "plot", id: `plot-${one.name}`, role: "img", "aria-label": `Stages of all ranks, ${one.name}`,
  });
  plot.style.height = `${stagesHeight(one)}px`;
  find("no-stages").hidden = true;
  find("passes").append(element("h3", one.name), plot);
  parsed[one.name] = one;
  figures[one.name] = stagesFigure;
  draw(one.name);
}

// Another moment, or another layer, by so many.
async function step(moments, layers) {
  if (!record) return;
  const { around } = record;
  const place = around.layers.indexOf(Number(route.layer)) + layers;
  const moment = around.moment + moments;
  if (place < 0 || place >= around.layers.length || moment < 0 || moment >= around.moments) return;
  const { key } = await ask("/api/worst", {
    trace: route.trace, layer: around.layers[place], from: moment, to: moment + 1,
  });
  if (key) go({ step: key[0], layer: key[1], microbatch: key[2] });
  else tell(`layer ${around.layers[place]} has no record there`);
}

function prepareRecord() {
  find("which").addEventListener("submit", (event) => {
    event.preventDefault();
    go({ step: find("step").value, microbatch: find("microbatch").value || 0, layer: find("layer").value });
  });
  find("layer").addEventListener("input", () => go({ layer: find("layer").value }));
  find("previous").addEventListener("click", () => step(-1, 0).catch(tell));
  find("next").addEventListener("click", () => step(1, 0).catch(tell));
  find("worst").addEventListener("click", () => openWorst().catch(tell));
}
