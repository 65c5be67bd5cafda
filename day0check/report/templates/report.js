"use strict";
// Filter chips and sortable columns. Everything on the page is readable without this.
(function () {
  const words = { failed: "failed", not_run: "not run", passed: "passed", note: "noted" };

  function chips(table) {
    const rows = Array.from(table.tBodies[0].rows);
    const states = Object.keys(words).filter((s) => rows.some((r) => r.dataset.state === s));
    if (states.length < 2) return;
    const bar = document.createElement("div");
    bar.className = "chips";
    const show = (state) => {
      rows.forEach((r) => { r.hidden = state !== "" && r.dataset.state !== state; });
      Array.from(bar.children).forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.state === state)));
    };
    ["", ...states].forEach((state) => {
      const button = document.createElement("button");
      const n = state === "" ? rows.length : rows.filter((r) => r.dataset.state === state).length;
      button.type = "button";
      button.dataset.state = state;
      button.textContent = (state === "" ? "all" : words[state]) + " " + n;
      button.addEventListener("click", () => show(state));
      bar.append(button);
    });
    table.parentElement.before(bar);
    show("");
  }

  function key(row, column) {
    const text = row.cells[column].textContent.trim();
    const value = Number(text.replace(/,/g, ""));
    return text !== "" && !Number.isNaN(value) ? value : text;
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b);
  }

  function sortable(table) {
    Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        Array.from(head.parentElement.cells).forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = Array.from(table.tBodies[0].rows);
        rows.sort((a, b) => compare(key(a, column), key(b, column)) * (down ? -1 : 1));
        table.tBodies[0].append(...rows);
      });
    });
  }

  document.querySelectorAll("table").forEach(sortable);
  document.querySelectorAll("table[data-filter]").forEach(chips);
  const open = () => {
    let e = document.getElementById(location.hash.slice(1));
    for (; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  };
  addEventListener("hashchange", open);
  open();
  addEventListener("beforeprint", () => document.querySelectorAll("details.chart, details.finding").forEach((d) => { d.open = true; }));
})();
