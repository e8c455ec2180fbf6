// The page: addresses, requests, open traces, keys.

const LOADS = { compare: loadCompare, overview: loadOverview, record: loadRecord };
const VIEWS = Object.keys(LOADS);
const KEYS = { 1: "overview", 2: "record", 3: "compare" };
const LISTENED = ["imbalance", "layers", "copies", "time"];
const figures = {
  imbalance: imbalanceFigure, layers: layersFigure, copies: copiesFigure, time: timeFigure,
  ranks: ranksWithWords, runs: runsFigure, runlayers: runLayersFigure,
  speed: trainingFigure("tokens_per_second", "tokens/s", "%{y:,.0f}", { rangemode: "tozero" }),
  loss: trainingFigure("loss", "loss", "%{y:.4f}"),
};
// The answers of the server, if this page is an exported file.
const baked = find("numbers-baked") ? numbers("baked") : null;
let route = {}; // view, trace, and the entries of the view
let state = { items: [] };
let turn = 0;

// -- addresses -----------------------------------------------------------------------------------

const traces = () => state.items;
const item = () => traces().find(({ name }) => name === route.trace);

// The run to show first: balanced if there is one.
function firstTrace() {
  const open = traces().filter(({ error }) => !error);
  return open.find(({ policy }) => policy === "ultraep") || open.find(({ policy }) => policy !== "none") || open[0];
}

function readRoute() {
  route = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!item()) route.trace = firstTrace()?.name ?? "";
  const start = item() && comparable().length > 1 ? "compare" : "overview";
  if (!VIEWS.includes(route.view)) route.view = start;
}

// An address with some entries changed; null removes an entry.
function address(changes) {
  const entries = Object.entries({ ...route, ...changes }).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#${new URLSearchParams(entries)}`;
}

// Go to an address. replace: it only completes the current one.
function go(changes, { replace = false } = {}) {
  const target = address(changes);
  if (target === location.hash) return show();
  if (!replace) return void (location.hash = target);
  history.replaceState(null, "", target);
  return show();
}

const goToRecord = ([step, layer, microbatch], options) => go({ view: "record", step, layer, microbatch }, options);

function chooseTrace(trace) {
  go({ step: null, layer: null, microbatch: null, from: null, to: null, trace });
}

// -- requests ------------------------------------------------------------------------------------

async function ask(name, parameters = {}) {
  if (baked) return bakedAnswer(name, parameters);
  const entries = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "");
  let answer;
  try {
    answer = await fetch(`/api/${name}?${new URLSearchParams(entries)}`);
  } catch {
    throw new Error("the viewer does not answer: has it been stopped?");
  }
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function bakedAnswer(name, { trace, step, layer, microbatch, from = 0, to = Infinity }) {
  if (name === "state") return baked.state;
  if (name === "overview") return baked.overview[trace];
  if (name === "worst") return { key: bakedWorst(trace, layer, Number(from), Number(to)) };
  const record = baked.records[trace][[step, layer, microbatch]];
  if (!record) throw new Error("this file does not contain that microbatch: it holds a selection, evenly spaced over the run");
  return record;
}

// The most imbalanced record of a range; if the file has none there, the nearest one.
function bakedWorst(trace, layer, from, to) {
  const here = [route.step, route.layer, route.microbatch].join();
  const records = Object.entries(baked.records[trace])
    .filter(([key]) => layer === undefined || key.split(",")[1] === String(layer))
    .map(([key, { around, before }]) => ({ key, before, distance: Math.abs(around.moment - from), moment: around.moment }));
  const inside = records.filter(({ moment }) => moment >= from && moment < to);
  const best = inside.length
    ? inside.reduce((a, b) => (b.before > a.before ? b : a))
    : records.filter(({ key }) => key !== here).reduce((a, b) => (b.distance < a.distance ? b : a), records[0]);
  return best ? best.key.split(",").map(Number) : null;
}

// -- drawing -------------------------------------------------------------------------------------

async function show() {
  const own = ++turn;
  readRoute();
  const shown = item() && !item().error;
  for (const view of VIEWS) find(`view-${view}`).hidden = view !== route.view || !shown;
  for (const link of document.querySelectorAll("nav a")) {
    const { view } = link.dataset;
    link.href = address({ view });
    link.hidden = view === "compare" && traces().length < 2;
    link.toggleAttribute("aria-current", view === route.view);
  }
  find("trace").value = route.trace;
  showItem();
  document.title = `${route.trace}: ${route.view} - ultraep view`;
  if (!shown) {
    if (item()) document.body.dataset.shown = location.hash;
    return;
  }
  try {
    await LOADS[route.view]();
    if (own === turn) showError(null);
  } catch (error) {
    if (own === turn) showError(error);
  }
  LISTENED.forEach(listen);
  document.body.dataset.shown = location.hash; // for tests, which wait until the view is drawn
}

function showError(error) {
  find("error").hidden = !error;
  find("error").textContent = error ? error.message || error : "";
}

function showItems() {
  const options = traces().map(({ name, error }) => new Option(error ? `${name} (cannot be opened)` : name, name));
  const texts = (list) => [...list].map(({ text }) => text).join("\n");
  if (texts(find("trace").options) !== texts(options)) find("trace").replaceChildren(...options);
  find("traces").hidden = options.length < 2;
}

function showItem() {
  const own = item();
  find("status").textContent = baked ? `Exported from ultraep ${state.version}.` : "";
  if (own?.error) showError(own.error);
  const notes = traces().filter(({ error, name }) => error && name !== own?.name).map(({ error }) => `cannot be opened: ${error}`);
  if (own && !own.error) notes.push(...notesOf(own));
  find("notes").hidden = !notes.length;
  find("notes").replaceChildren(...notes.map((text) => element("li", text)));
}

function notesOf(own) {
  const notes = [...own.notes];
  if (own.dropped) notes.push(`${counted(own.dropped, "record")} or additions were dropped: they arrived faster than they could be written`);
  if (own.left_out) notes.push(`${counted(own.left_out, "record")} left out: some ranks lack them, or have not written them yet`);
  if (!own.records) notes.push("the trace has no record that all ranks wrote");
  return baked ? [...notes, ...baked.notes] : notes;
}

async function start() {
  try {
    state = await ask("state");
  } catch (error) {
    return showError(error);
  }
  showItems();
  return show();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (KEYS[event.key]) go({ view: KEYS[event.key] });
  else if (event.key === "w") openWorst().catch(showError);
  else if (moves[event.key] && route.view === "record") step(...moves[event.key]).catch(showError);
  else return;
  event.preventDefault();
}

// -- words ---------------------------------------------------------------------------------------

const number = (value) => value.toLocaleString("en");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

function sizeWords(count) {
  if (count === null || count === undefined) return "-";
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= factor) return `${(count / factor).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

function timeWords(seconds) {
  if (seconds >= 1) return `${seconds.toPrecision(4)} s`;
  return seconds >= 1e-3 ? `${(1e3 * seconds).toPrecision(3)} ms` : `${(1e6 * seconds).toPrecision(3)} \u00b5s`;
}

function element(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function table(head, rows) {
  const node = element("table"), top = node.createTHead().insertRow();
  head.forEach((text) => top.append(element("th", text, { scope: "col" })));
  const body = node.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((text, place) => row.append(element(place ? "td" : "th", text)));
  }
  return node;
}

find("trace").addEventListener("input", () => chooseTrace(find("trace").value));
document.addEventListener("keydown", pressed);
window.addEventListener("hashchange", show);
prepareRecord();
start();
