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
