// Search over SECTIONS (sections.js), which also works for pages opened as files.
// A section is [address, title of its page, heading, text].

const MOST_RESULTS = 50;
const EXCERPT = 160; // characters around the first match

function wordsOf(query) {
  return query.toLowerCase().split(/\s+/).filter(Boolean);
}

// Sections that contain all words; matches in headings first.
function search(words) {
  const ranked = [];
  for (const section of SECTIONS) {
    const [, title, heading, text] = section.map((part) => part.toLowerCase());
    const score = words.map(
      (word) => 8 * heading.includes(word) + 4 * title.includes(word) + text.includes(word));
    if (score.every(Boolean)) {
      ranked.push([score.reduce((sum, one) => sum + one, 0), section]);
    }
  }
  ranked.sort((a, b) => b[0] - a[0]);
  return ranked.map(([, section]) => section);
}

function excerpt(text, words) {
  const at = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
  const begin = Math.max(0, Math.min(...at, text.length) - EXCERPT / 2);
  const end = Math.min(text.length, begin + EXCERPT);
  return (begin ? "…" : "") + text.slice(begin, end) + (end < text.length ? "…" : "");
}

// The text as nodes, with every word in a <mark>.
function marked(text, words) {
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const parts = text.split(new RegExp(`(${escaped.join("|")})`, "i"));
  return parts.map((part, index) => (index % 2 ? element("mark", part) : part));
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function resultItem([address, title, heading, text], words) {
  const link = element("a", ...marked(heading, words));
  link.href = address;
  const page = element("div", title);
  page.className = "page";
  return element("li", link, page, element("p", ...marked(excerpt(text, words), words)));
}

function show(query) {
  const results = document.getElementById("search-results");
  const words = wordsOf(query);
  if (!words.length) {
    results.replaceChildren(element("p", "Enter one or more words in the search field."));
    return;
  }
  const matches = search(words);
  const shown = matches.slice(0, MOST_RESULTS);
  const more = matches.length > shown.length ? `; the first ${shown.length} are shown` : "";
  const count = `${matches.length} ${matches.length === 1 ? "section contains" : "sections contain"} `;
  results.replaceChildren(
    element("h1", "Search"),
    element("p", count, element("strong", query), more, "."),
    element("ul", ...shown.map((section) => resultItem(section, words))));
}

document.addEventListener("DOMContentLoaded", () => {
  const query = new URLSearchParams(location.search).get("q") || "";
  for (const field of document.querySelectorAll('input[name="q"]')) field.value = query;
  show(query);
});
