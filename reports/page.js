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
  bar.setAttribute("aria-label", "Filter: " + region.getAttribute("aria-label"));
  bar.addEventListener("submit", (event) => event.preventDefault());
  const text = Object.assign(document.createElement("input"), { type: "search", autocomplete: "off" });
  const choice = document.createElement("select");
  const state = (row) => row.cells[0].dataset.f ?? row.cells[0].textContent.trim().replace(/^\S\s+/, "");
  const what = table.dataset.filter;
  const verdicts = [...new Set(rows.map(state))].sort();
  choice.append(new Option("every " + what.toLowerCase(), ""), ...verdicts.map((verdict) => new Option(verdict, verdict)));
  const count = document.createElement("output");
  const label = (words, field) => {
    const element = document.createElement("label");
    element.append(words + " ", field);
    return element;
  };
  bar.append(label("Name or words", text), label(what, choice), count);
  region.before(bar);
  const haystacks = rows.map((row) => (row.cells[1].textContent + " " + row.cells[2].textContent).toLowerCase());
  const states = rows.map(state);
  const index = new Map(rows.map((row, place) => [row, place]));
  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, place] of index) {
      row.hidden = !(words.every((word) => haystacks[place].includes(word)) &&
        (choice.value === "" || states[place] === choice.value));
      shown += !row.hidden;
    }
    count.textContent = shown === rows.length ? `${rows.length} ${table.dataset.rows}` : `${shown} of ${rows.length} ${table.dataset.rows}`;
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

// A site's index: a choice of two runs leads to the page of the one that was published later.
for (const form of document.querySelectorAll("form[data-chooser]")) {
  const rows = [...document.querySelectorAll("table[data-list] tbody tr")];
  const runs = rows.map((row) => ({ number: Number(row.cells[0].textContent), id: row.cells[1].textContent.trim() }));
  if (runs.length < 2) continue;
  const [from, to] = form.querySelectorAll("select");
  for (const field of [from, to]) {
    field.append(...runs.map((run) => new Option(`#${run.number} ${run.id}`, run.number)));
  }
  from.selectedIndex = 1;
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const pair = [from, to].map((field) => runs[field.selectedIndex]).sort((a, b) => a.number - b.number);
    location.href = pair[0] === pair[1] ? `runs/${pair[1].id}/index.html`
      : `runs/${pair[1].id}/changes.html#since-${pair[0].id}`;
  });
}

// A run's page of changes: a link to one earlier run leaves the cases that differ from it.
for (const table of document.querySelectorAll("table[data-since]")) {
  const words = document.querySelector("[data-since-words]");
  const usual = words.textContent;
  const show = () => {
    const row = location.hash.startsWith("#since-") ? document.getElementById(location.hash.slice(1)) : null;
    const number = row ? Number(row.dataset.number) : 0;
    let shown = 0;
    for (const line of table.tBodies[0].rows) {
      line.hidden = number > 0 && !line.dataset.runs.split(",").some((range) => {
        const [first, last] = range.split("-").map(Number);
        return first <= number && number <= last;
      });
      shown += !line.hidden;
    }
    words.textContent = number > 0 ? `From run #${number} to this one: ${shown} of ${table.tBodies[0].rows.length} cases differ.` : usual;
    if (number > 0) document.getElementById("cases").scrollIntoView();
  };
  addEventListener("hashchange", show);
  show();
}
