// The page: open traces, the current view, keys; and polling while there is more to come.

const figures = {
  imbalance: imbalanceFigure, layers: layersFigure, copies: copiesFigure, time: timeFigure, rankspeeds: speedsFigure,
  map: mapFigure, ranks: ranksWithWords, flows: (list) => flowsFigure(list, find("plot-flows").clientWidth),
  runs: runsFigure, runlayers: runLayersFigure,
  speed: trainingFigure("tokens_per_second", "tokens/s", "%{y:,.0f}", { rangemode: "tozero" }),
  loss: trainingFigure("loss", "loss", "%{y:.4f}"),
};
const LOADS = { overview: loadOverview, map: loadMap, record: loadRecord, compare: loadCompare, report: loadReport };
const LISTENED = ["imbalance", "layers", "copies", "time", "rankspeeds", "map"];
const PERIOD = 1000; // milliseconds between two polls
let turn = 0, drawnVersion = "";

async function show() {
  const own = ++turn;
  readRoute();
  const shown = route.view === "report" || (item() && !item().error);
  for (const view of VIEWS) find(`view-${view}`).hidden = view !== route.view || !shown;
  for (const link of document.querySelectorAll("nav a")) {
    const { view, report = null } = link.dataset;
    link.href = address({ view, report });
    const current = view === route.view && (!report || report === route.report);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  find("trace").value = route.trace;
  showItem();
  const subject = route.view === "report" ? route.report : item()?.name;
  document.title = `${subject ? `${subject}: ` : ""}${route.view} - ultraep view`;
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

function loadReport() {
  const source = `/report?name=${encodeURIComponent(route.report ?? "")}`;
  if (find("report").getAttribute("src") !== source) find("report").setAttribute("src", source);
}

// -- open traces ---------------------------------------------------------------------------------

function showItems() {
  const options = traces().map(({ name, error }) => new Option(error ? `${name} (cannot be opened)` : name, name));
  const texts = (list) => [...list].map(({ text }) => text).join("\n");
  if (texts(find("trace").options) !== texts(options)) find("trace").replaceChildren(...options);
  find("traces").hidden = options.length === 0;
  if (find("reports").childElementCount !== reports().length) {
    find("reports").replaceChildren(...reports().map(({ name }) =>
      element("a", reports().length > 1 ? name : "Report", { "data-view": "report", "data-report": name })));
  }
}

function showItem() {
  const own = item();
  if (!own) {
    find("status").textContent = route.view === "report" ? ""
      : state.live ? `Waiting for a trace in ${state.waiting_for.join(", ")}.` : "There is no trace to show.";
  } else if (own.error) {
    find("status").textContent = "";
    showError(own.error);
  } else {
    find("status").textContent = progressWords(own);
    const parts = [counted(own.ranks, "rank"), counted(own.experts, "expert"), `${counted(own.slots, "spare slot")} per rank`];
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
  if (baked) return `Exported from ultraep ${state.version}.`;
  if (own.finished) return state.live ? `Follows the run: ${counted(own.records, "record")} so far.` : "";
  return `${counted(own.records, "record")} so far, ${Math.floor((100 * own.done) / Math.max(own.total, 1))} % of the trace is read.`;
}

function showNotes(own) {
  const notes = traces().filter(({ error, name }) => error && (!own || name !== own.name)).map(({ error }) => `cannot be opened: ${error}`);
  if (own && !own.error) {
    notes.push(...own.notes);
    if (own.gone) notes.push(own.gone);
    if (own.dropped) notes.push(`${counted(own.dropped, "record")} or additions were dropped: they arrived faster than they could be written`);
    if (own.left_out && !state.live) notes.push(`${counted(own.left_out, "record")} left out: some ranks lack them`);
    if (own.finished && !own.records && !state.live) notes.push("the trace has no record that all ranks wrote");
    if (baked) notes.push(...baked.notes);
  }
  find("notes").hidden = !notes.length;
  find("notes").replaceChildren(...notes.map((text) => element("li", text)));
}

// Poll while there is more to come, and draw what has changed.
async function follow() {
  for (;;) {
    let lost = null;
    try {
      state = await ask("state");
    } catch (error) {
      lost = error;
    }
    if (lost) find("status").textContent = lost.message;
    else await update();
    const over = !lost && !state.live && traces().every(({ finished, error }) => finished || error);
    if (over) return;
    await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
}

async function update() {
  showItems();
  readRoute();
  showItem();
  const own = item();
  const version = own ? `${own.name} ${own.version} ${own.finished}` : "none";
  const settled = route.view === "report" || route.view === "compare" || (route.view === "record" && record);
  if (version === drawnVersion || (drawnVersion && settled)) return;
  drawnVersion = version;
  await show();
}

// -- keys ----------------------------------------------------------------------------------------

function pressed(event) {
  const typing = event.target.closest("input, select, textarea, dialog[open], [role=application]");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "?")) return;
  const view = baked && event.key === "4" ? undefined : { 1: "overview", 2: "map", 3: "record", 4: "compare" }[event.key];
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (view) go({ view });
  else if (event.key === "w") openWorst().catch(showError);
  else if (event.key === "?") find("help").showModal();
  else if (event.key === "[" || event.key === "]") nextTrace(event.key === "]" ? 1 : -1);
  else if (moves[event.key] && route.view === "record") step(...moves[event.key]).catch(showError);
  else return;
  event.preventDefault();
}

function nextTrace(by) {
  const options = [...find("trace").options], place = find("trace").selectedIndex + by;
  if (options[place]) chooseTrace(options[place].value);
}

function chooseTrace(trace) {
  go({ ...Object.fromEntries(TRACE_ENTRIES.map((name) => [name, null])), trace });
}

find("trace").addEventListener("input", () => chooseTrace(find("trace").value));
find("keys").addEventListener("click", () => find("help").showModal());
document.addEventListener("keydown", pressed);
window.addEventListener("hashchange", show);
prepareOverview();
prepareMap();
prepareRecord();
prepareCompare();
if (baked) document.querySelector('nav a[data-view="compare"]').remove();
follow();
