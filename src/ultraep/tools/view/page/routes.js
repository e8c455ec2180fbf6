// Where the reader is, as the address says it, and how questions are asked.

const VIEWS = ["overview", "map", "record", "compare"];
let route = {}; // view, trace, and what else belongs to the view
let state = { items: [], policies: [] };

function readRoute() {
  route = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!VIEWS.includes(route.view)) route.view = "overview";
  const known = state.items.some(({ number, kind }) => kind === "trace" && String(number) === route.trace);
  const first = state.items.find(({ kind, error }) => kind === "trace" && !error);
  if (!known) route.trace = first ? String(first.number) : "";
}

// An address with some entries changed; null takes one away.
function address(changes) {
  const entries = Object.entries({ ...route, ...changes }).filter(([, value]) => value !== null && value !== "");
  return `#${new URLSearchParams(entries)}`;
}

// Go there; an address that only says more of the same place replaces this one.
function go(changes, { replace = false } = {}) {
  const wanted = address(changes);
  if (wanted === location.hash) return show();
  if (!replace) return void (location.hash = wanted);
  history.replaceState(null, "", wanted);
  return show();
}

const item = () => state.items.find(({ number }) => String(number) === route.trace);

async function ask(path, parameters = {}, options = {}) {
  const entries = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "");
  const query = new URLSearchParams(entries).toString();
  let answer;
  try {
    answer = await fetch(query ? `${path}?${query}` : path, options);
  } catch {
    throw new Error("the viewer does not answer: has it been ended?");
  }
  const kind = answer.headers.get("content-type") || "";
  const found = kind.startsWith("application/json") ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error(found.error || `answer ${answer.status}`);
  return found;
}

const post = (path, body) =>
  ask(path, {}, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

function tell(error) {
  find("error").hidden = !error;
  find("error").textContent = error ? error.message || error : "";
}

// -- words ---------------------------------------------------------------------------------------

const number = (value) => value.toLocaleString("en");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
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

function element(tag, text, more = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(more)) made.setAttribute(name, value);
  return made;
}

function table(head, rows) {
  const made = element("table"), top = made.createTHead().insertRow();
  head.forEach((text) => top.append(element("th", text, { scope: "col" })));
  const body = made.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((text, place) => row.append(element(place ? "td" : "th", text)));
  }
  return made;
}
