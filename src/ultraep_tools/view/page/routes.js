// The address of a view, requests to the server, and words for numbers.

const VIEWS = ["overview", "map", "record", "compare", "report"];
const TRACE_ENTRIES = ["step", "layer", "microbatch", "from", "to", "also", "policy", "slots", "ranks", "history", "tolerance"];
// The answers of the server, if this page is an exported file.
const baked = find("baked") ? JSON.parse(find("baked").textContent) : null;
let route = {}; // view, trace, and the entries of the view
let state = { items: [], policies: [] };

const traces = () => state.items.filter(({ kind }) => kind === "trace");
const reports = () => state.items.filter(({ kind }) => kind === "report");
const item = () => traces().find(({ name }) => name === route.trace);

// The run to show first: balanced if there is one.
function firstTrace() {
  const open = traces().filter(({ error }) => !error);
  return open.find(({ policy }) => policy === "ultraep") || open.find(({ policy }) => policy !== "none") || open[0];
}

function readRoute() {
  route = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!VIEWS.includes(route.view)) route.view = !traces().length && reports().length ? "report" : "overview";
  if (!item()) route.trace = firstTrace()?.name ?? "";
  if (route.view === "report") route.report ??= reports()[0]?.name;
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
  const json = (answer.headers.get("content-type") || "").startsWith("application/json");
  const content = json ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error(content.error || `answer ${answer.status}`);
  return content;
}

function bakedAnswer(name, { step, layer, microbatch, from = 0, to = Infinity, value }) {
  if (name === "heat") return baked.heat[value];
  if (name === "worst") return { key: bakedWorst(layer, Number(from), Number(to)) };
  if (name !== "record") return baked[name];
  const record = baked.records[[step, layer, microbatch]];
  if (!record) throw new Error("this file does not contain that microbatch: it holds a selection, evenly spaced over the run");
  return record;
}

// The most imbalanced record of a range; if the file has none there, the nearest one.
function bakedWorst(layer, from, to) {
  const here = [route.step, route.layer, route.microbatch].join();
  const records = Object.entries(baked.records)
    .filter(([key]) => layer === undefined || key.split(",")[1] === String(layer))
    .map(([key, { around, before }]) => ({ key, before, moment: around.moment }));
  const inside = records.filter(({ moment }) => moment >= from && moment < to);
  const distance = ({ key, moment }) => (key === here ? Infinity : Math.abs(moment - from));
  const best = inside.length
    ? inside.reduce((a, b) => (b.before > a.before ? b : a))
    : records.reduce((a, b) => (distance(b) < distance(a) ? b : a), records[0]);
  return best ? best.key.split(",").map(Number) : null;
}

function showError(error) {
  find("error").hidden = !error;
  find("error").textContent = error ? error.message || error : "";
}

// -- words ---------------------------------------------------------------------------------------

const number = (value) => value.toLocaleString("en");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
const ratioWords = (value) => (value === null || value === undefined ? "-" : value.toFixed(3));

function sizeWords(count) {
  if (count === null || count === undefined) return "-";
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= factor) return `${(count / factor).toPrecision(3)} ${unit}`;
  }
  return `${count} B`;
}

function timeWords(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const size = Math.abs(seconds);
  if (size >= 1) return `${seconds.toPrecision(4)} s`;
  return size >= 1e-3 ? `${(1e3 * seconds).toPrecision(3)} ms` : `${(1e6 * seconds).toPrecision(3)} \u00b5s`;
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
