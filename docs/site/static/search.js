// Search over SECTIONS (sections.js), which also works for pages opened as files.
// A section is [address, title of its page, heading, text].

const MOST_RESULTS = 50;
const EXCERPT = 160; // characters around the first match

// One pattern per word of the query, which matches at the beginning of a word.
function patternsOf(query) {
  const words = query.split(/\s+/).filter(Boolean);
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return escaped.map((word) => new RegExp(`(?<![\\p{L}\\p{N}])${word}`, "iu"));
}

// Sections that match all patterns; matches in headings first.
function search(patterns) {
  const ranked = [];
  for (const section of SECTIONS) {
    const [, title, heading, text] = section;
    const scores = patterns.map(
      (one) => 8 * one.test(heading) + 4 * one.test(title) + one.test(text));
    if (scores.every(Boolean)) {
      ranked.push([scores.reduce((sum, score) => sum + score, 0), section]);
    }
  }
  ranked.sort((a, b) => b[0] - a[0]);
  return ranked.map(([, section]) => section);
}

function excerpt(text, patterns) {
  const places = patterns.map((one) => text.search(one)).filter((place) => place >= 0);
  const begin = Math.max(0, Math.min(...places, text.length) - EXCERPT / 2);
  const end = Math.min(text.length, begin + EXCERPT);
  return (begin ? "…" : "") + text.slice(begin, end) + (end < text.length ? "…" : "");
}

// The text as nodes, with every match in a <mark>.
function marked(text, patterns) {
  const any = new RegExp(`(${patterns.map((one) => one.source).join("|")})`, "iu");
  return text.split(any).map((part, index) => (index % 2 ? element("mark", part) : part));
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function resultItem([address, title, heading, text], patterns) {
  const link = element("a", ...marked(heading, patterns));
  link.href = address;
  const page = element("div", title);
  page.className = "page";
  return element("li", link, page, element("p", ...marked(excerpt(text, patterns), patterns)));
}

function show(query) {
  const results = document.getElementById("search-results");
  const patterns = patternsOf(query);
  if (!patterns.length) {
    results.replaceChildren(element("p", "Enter one or more words in the search field."));
    return;
  }
  const matches = search(patterns);
  const shown = matches.slice(0, MOST_RESULTS);
  const more = matches.length > shown.length ? `; the first ${shown.length} are shown` : "";
  const count = `${matches.length} ${matches.length === 1 ? "section contains" : "sections contain"} `;
  results.replaceChildren(
    element("h1", "Search"),
    element("p", count, element("strong", query), more, "."),
    element("ul", ...shown.map((section) => resultItem(section, patterns))));
}

document.addEventListener("DOMContentLoaded", () => {
  const query = new URLSearchParams(location.search).get("q") || "";
  for (const field of document.querySelectorAll('input[name="q"]')) field.value = query;
  show(query);
});
