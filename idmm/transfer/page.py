"""What grid.html looks like and does: its style sheet and its script, both inline there, both without any network."""

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1b1b; --quiet: #5c5c5c; --line: #d5d5d5; --band: #f3f4f6;
  --mark: #0b57d0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15171a; --ink: #e8e8e8; --quiet: #a9adb3; --line: #3b3f45; --band: #20242a; --mark: #8ab4f8;
    --bad: #f2b8b5; }
}
html { scroll-padding-bottom: 30vh; }  /* what has the focus is not under the details */
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1.2rem 3rem; max-width: 90rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .3rem 0; max-width: 60rem; } .quiet { color: var(--quiet); }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--ink); background: var(--ground); white-space: nowrap; }
th[scope=row] { font-weight: 500; }
.number { text-align: right; } #grid td, #grid th { white-space: nowrap; }
.scratch { background: var(--band); }
small { color: var(--quiet); } td small { display: inline-block; min-width: 3.1em; text-align: left; }
td small + small { min-width: 4.1em; } u { text-decoration-thickness: 2px; text-underline-offset: 2px; }
.failed { color: var(--bad); font-style: italic; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th button::after { content: " \\2195"; color: var(--quiet); }
th[aria-sort=ascending] button::after { content: " \\2191"; color: var(--mark); }
th[aria-sort=descending] button::after { content: " \\2193"; color: var(--mark); }
#grid td[tabindex]:hover { background: var(--band); cursor: pointer; }
:focus-visible { outline: 2px solid var(--mark); outline-offset: -2px; }
td.shown { box-shadow: inset 0 0 0 2px var(--mark); }
#filters { margin: .8rem 0; display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center; }
[hidden] { display: none !important; }
select { font: inherit; margin-left: .3rem; max-width: 20rem; }
#details { position: sticky; bottom: 0; max-height: 45vh; overflow: auto; background: var(--ground);
  border: 1px solid var(--line); border-top: 3px solid var(--mark); padding: .6rem .9rem; font-size: 13.5px; }
#details h2 { margin: 0 0 .2rem; } #details dl, details dl { display: grid; grid-template-columns: max-content 1fr;
  gap: .1rem .9rem; margin: .5rem 0; } dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
details summary { cursor: pointer; } a { color: var(--mark); }
"""

SCRIPT = """
"use strict";
(() => {
  const cells = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("grid");
  if (!table) return;
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], original = [...body.rows];
  const details = document.getElementById("details"), status = document.getElementById("status");
  let sortedBy = "", pinned = null;

  const make = (tag, text, parent) => {
    const node = document.createElement(tag);
    node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };

  // ---------------------------------------------------------------- sorting
  function sort(column) {
    const head = heads[column], numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const descending = before === "none" ? numeric : before === "ascending";
    heads.forEach(other => other.hasAttribute("aria-sort") && other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[column];
      if (!numeric) return cell.textContent;
      return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
    };
    const compare = (a, b) => {
      const one = key(a), other = key(b);
      if (one === null || other === null) return (one === null) - (other === null);  // nothing goes last, either way
      const order = numeric ? one - other : one.localeCompare(other, undefined, {numeric: true});
      return descending ? -order : order;
    };
    body.append(...[...original].sort(compare));
    sortedBy = `; sorted by ${head.dataset.name}, ${descending ? "descending" : "ascending"}`;
    tell();
  }
  heads.forEach((head, column) => {
    head.dataset.name = head.textContent;
    head.setAttribute("aria-sort", "none");
    const button = make("button", head.textContent);
    button.type = "button";
    button.addEventListener("click", () => sort(column));
    head.replaceChildren(button);
  });

  // ---------------------------------------------------------------- filters
  const filters = [...document.querySelectorAll("#filters select")];
  function filter() {
    original.forEach(row => {
      row.hidden = filters.some(select => select.value !== "" && row.dataset[select.name] !== select.value);
    });
    const first = visible()[0];
    rove(first && first.querySelector("td[data-cell]"));
    tell();
  }
  filters.forEach(select => {
    select.addEventListener("change", filter);
    select.parentElement.hidden = select.options.length < 3;
  });
  document.getElementById("filters").hidden = false;
  function visible() { return [...body.rows].filter(row => !row.hidden); }
  function tell() { status.textContent = `${visible().length} of ${original.length} rows${sortedBy}`; }

  // ---------------------------------------------------------------- details of a cell
  const places = [...body.querySelectorAll("td[data-cell]")];
  function rove(cell) {  // one cell is reached by Tab, the others from it by arrows
    places.forEach(place => place.tabIndex = -1);
    if (cell) cell.tabIndex = 0;
  }
  function close() {
    places.forEach(place => place.classList.remove("shown"));
    details.hidden = true;
    pinned = null;
  }
  function show(place) {
    if (pinned && pinned !== place) return;
    const cell = cells[Number(place.dataset.cell)];
    places.forEach(other => other.classList.toggle("shown", other === place));
    details.replaceChildren();
    make("h2", cell.title, details);
    make("p", cell.said, details);
    const runs = make("table", "", details), columns = cell.columns;
    const top = runs.createTHead().insertRow();
    columns.forEach(name => make("th", name, top).scope = "col");
    const lines = runs.createTBody();
    cell.runs.forEach(run => {
      const line = lines.insertRow();
      run.forEach((value, n) => {
        if (columns[n] !== "folder" && columns[n] !== "log") return void make("td", value, line);
        const link = make("td", "", line);
        if (value) make("a", columns[n], link).href = value;
      });
    });
    const list = make("dl", "", details);
    cell.config.forEach(([key, value]) => { make("dt", key, list); make("dd", value, list); });
    details.hidden = false;
  }
  function move(place, down, right) {
    const rows = visible(), row = rows[rows.indexOf(place.parentElement) + down];
    const next = row && row.cells[place.cellIndex + right];
    if (next && next.dataset.cell !== undefined) { rove(next); next.focus(); }
  }
  const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  places.forEach(place => {
    place.removeAttribute("title");  // the details say more
    place.addEventListener("mouseenter", () => show(place));
    place.addEventListener("focus", () => { pinned = null; show(place); });
    const pin = () => {
      const again = pinned === place;
      pinned = null;
      show(place);
      pinned = again ? null : place;
    };
    place.addEventListener("click", () => { rove(place); pin(); });
    place.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") pin();
      else if (steps[event.key]) move(place, ...steps[event.key]);
      else return;
      event.preventDefault();
    });
  });
  document.addEventListener("keydown", event => { if (event.key === "Escape") close(); });
  filter();
})();
"""
