"use strict";
// Sorts and filters the tables of cases. Without it the page says the same.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.r === undefined ? cell.textContent.trim() : Number(cell.dataset.r);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") !== "descending" &&
        (head.classList.contains("n") || head.getAttribute("aria-sort") === "ascending");
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      rows.sort((a, b) => {
        const x = key(a, column), y = key(b, column);
        const order = typeof x === "number" ? x - y : x.localeCompare(y);
        return descending ? -order : order;
      });
      body.append(...rows);
    });
  });
  const region = table.parentElement;
  const bar = document.createElement("form");
  bar.className = "filter";
  bar.setAttribute("role", "search");
  bar.setAttribute("aria-label", "Filter the cases of " + region.getAttribute("aria-label").replace("All cases of ", ""));
  bar.addEventListener("submit", (event) => event.preventDefault());
  const text = Object.assign(document.createElement("input"), { type: "search", autocomplete: "off" });
  const choice = document.createElement("select");
  const verdicts = [...new Set(rows.map((row) => row.cells[0].textContent.trim().replace(/^\S\s+/, "")))].sort();
  choice.append(new Option("every verdict", ""), ...verdicts.map((verdict) => new Option(verdict, verdict)));
  const count = document.createElement("output");
  const label = (words, field) => {
    const element = document.createElement("label");
    element.append(words + " ", field);
    return element;
  };
  bar.append(label("Name, family or shape", text), label("Verdict", choice), count);
  region.before(bar);
  const haystacks = rows.map((row) => (row.cells[1].textContent + " " + row.cells[2].textContent).toLowerCase());
  const states = rows.map((row) => row.cells[0].textContent.trim().replace(/^\S\s+/, ""));
  const index = new Map(rows.map((row, place) => [row, place]));
  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, place] of index) {
      row.hidden = !(words.every((word) => haystacks[place].includes(word)) &&
        (choice.value === "" || states[place] === choice.value));
      shown += !row.hidden;
    }
    count.textContent = shown === rows.length ? `${rows.length} cases` : `${shown} of ${rows.length} cases`;
  };
  text.addEventListener("input", filter);
  choice.addEventListener("change", filter);
  // A link to a case that the filter hides shows it again.
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.hidden) { text.value = ""; choice.value = ""; filter(); target.scrollIntoView(); }
  });
  filter();
}
