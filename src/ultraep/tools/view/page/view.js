// The page: what is open, which view is shown, keys; and looking again while there is more to come.

const figures = {
  imbalance: imbalanceFigure, layers: layersFigure, copies: copiesFigure, time: timeFigure,
  map: mapFigure, ranks: ranksWithWords, flows: (list) => flowsFigure(list, find("plot-flows").clientWidth),
  both: bothFigure, bothlayers: bothLayersFigure,
};
const LOADS = { overview: loadOverview, map: loadMap, record: loadRecord, compare: loadCompare };
const LISTENED = ["imbalance", "layers", "copies", "time", "map"];
const PERIOD = 1000; // milliseconds between two looks
let turn = 0, drawnVersion = "";

async function show() {
  const own = ++turn;
  readRoute();
  const shown = item() && !item().error;
  for (const view of VIEWS) find(`view-${view}`).hidden = view !== route.view || !shown;
  for (const link of document.querySelectorAll("nav a")) {
    link.href = address({ view: link.dataset.view });
    if (link.dataset.view === route.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  find("trace").value = route.trace;
  showItem();
  document.title = `${route.view}${item() ? ` of ${item().name}` : ""} - ultraep view`;
  if (!shown) {
    if (item()) document.body.dataset.shown = location.hash;
    return;
  }
  try {
    await LOADS[route.view]();
    if (own === turn) tell(null);
  } catch (error) {
    if (own === turn) tell(error);
  }
  LISTENED.forEach(listen);
  document.body.dataset.shown = location.hash; // for those who wait until it is drawn
}

// -- what is open --------------------------------------------------------------------------------

function showItems() {
  const traces = state.items.filter(({ kind }) => kind === "trace");
  const options = traces.map(({ number: own, name, error }) => new Option(error ? `${name} (cannot be opened)` : name, own));
  const shown = [...find("trace").options].map(({ text, value }) => text + value).join();
  if (shown !== options.map(({ text, value }) => text + value).join()) find("trace").replaceChildren(...options);
  const reports = state.items.filter(({ kind }) => kind === "report");
  if (find("reports").childElementCount !== reports.length) {
    find("reports").replaceChildren(...reports.map(({ number: own, name }) =>
      element("a", name, { href: `/report/${own}` })));
  }
}

function showItem() {
  const own = item();
  if (!own) {
    find("status").textContent = state.live ? `Waiting for a trace in ${state.waiting_for.join(", ")}.`
      : "There is no trace that can be shown.";
  } else if (own.error) {
    find("status").textContent = "";
    tell(own.error);
  } else {
    find("status").textContent = progressWords(own);
    const parts = [counted(own.ranks, "rank"), counted(own.experts, "expert"), `${counted(own.slots, "spare slot")} each`];
    if (own.domain !== own.ranks) parts.push(`domains of ${counted(own.domain, "rank")}`);
    find("heading").textContent = own.name;
    find("facts").textContent = `${parts.join(", ")}. Policy ${own.policy}, objective ${own.objective}, tolerance ${own.tolerance}, ` +
      `recorded ${own.created}. ${own.note}`;
  }
  find("reading").hidden = !own || own.error || own.finished || !own.total;
  if (own && own.total) find("reading").value = own.done / own.total;
  showNotes(own);
}

function progressWords(own) {
  if (own.finished) return state.live ? `Follows the run: ${counted(own.records, "record")} so far.` : "";
  return `${counted(own.records, "record")}; the trace is being read, ${Math.floor((100 * own.done) / Math.max(own.total, 1))} %.`;
}

function showNotes(own) {
  const others = state.items.filter(({ error, number: place }) => error && (!own || place !== own.number));
  const notes = others.map(({ error }) => `cannot be opened: ${error}`);
  if (own && !own.error) {
    notes.push(...own.notes);
    if (own.gone) notes.push(own.gone);
    if (own.dropped) notes.push(`${counted(own.dropped, "record")} or additions were dropped: they came faster than they could be written`);
    if (own.left_out && !state.live) notes.push(`${counted(own.left_out, "record")} left out: not all ranks have them`);
    if (own.finished && !own.records && !state.live) notes.push("nothing was recorded, or nothing that all ranks have");
  }
  find("notes").hidden = !notes.length;
  find("notes").replaceChildren(...notes.map((text) => element("li", text)));
}

// Look again as long as there is more to come; draw again what has changed.
async function follows() {
  for (;;) {
    let lost = null;
    try {
      state = await ask("/api/state");
    } catch (error) {
      lost = error;
    }
    if (lost) find("status").textContent = lost.message;
    else await noticed();
    const over = !lost && !state.live && state.items.every(({ finished, error, kind }) => finished || error || kind === "report");
    if (over) return;
    await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
}

async function noticed() {
  showItems();
  readRoute();
  showItem();
  const own = item();
  const version = own ? `${own.number} ${own.version} ${own.complete}` : "";
  const settled = route.view === "record" && record;
  if (version === drawnVersion || (drawnVersion && (settled || route.view === "compare"))) return;
  drawnVersion = version;
  await show();
}

// -- keys ----------------------------------------------------------------------------------------

function pressed(event) {
  const typing = event.target.closest("input, select, textarea, dialog[open], [role=application]");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "?")) return;
  const views = { 1: "overview", 2: "map", 3: "record", 4: "compare" };
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (views[event.key]) go({ view: views[event.key] });
  else if (event.key === "w") openWorst().catch(tell);
  else if (event.key === "?") find("help").showModal();
  else if (event.key === "[" || event.key === "]") nextTrace(event.key === "]" ? 1 : -1);
  else if (moves[event.key] && route.view === "record") step(...moves[event.key]).catch(tell);
  else return;
  event.preventDefault();
}

function nextTrace(by) {
  const options = [...find("trace").options], place = find("trace").selectedIndex + by;
  if (options[place]) chooseTrace(options[place].value);
}

function chooseTrace(trace) {
  go({ view: route.view, trace, step: null, layer: null, microbatch: null, from: null, to: null, other: null });
}

find("trace").addEventListener("input", () => chooseTrace(find("trace").value));
find("keys").addEventListener("click", () => find("help").showModal());
document.addEventListener("keydown", pressed);
window.addEventListener("hashchange", show);
prepareOverview();
prepareMap();
prepareRecord();
prepareCompare();
follows();
