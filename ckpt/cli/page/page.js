"use strict";
// Draws the heat map: rows are groups of ranks, columns are layers. Names reach the page as text only (textContent,
// fillText), never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { layers, held, columns: rows } = data.heat;
  const [map, axis, cells, mark, tip, legend, roleChoice, countChoice] =
    ["map", "axis", "cells", "mark", "tip", "legend", "role", "count"].map((id) => document.getElementById(id));
  const CLASSES = ["0: nobody has it", "1", "2", "3–4", "5–8", "9–16", "17–64", "65 and more"];
  const BAR = 5; // pixels above a layer of which something cannot be rebuilt
  const EDGE = 10; // pixels beyond the last cells, for labels that are wider than their cell
  const LAYER = 0, COPIES = 1, DOMAINS = 2, HELD = 3, LEAST = 4, MOST = 5; // of a cell
  const at = rows.map((row) => new Map(row.cells.map((cell) => [cell[LAYER], cell])));
  const label = shortNames(layers);
  const numbered = layers.map((name, x) => label[x] !== name);
  const { ranks: lostRanks, bytes: lostBytes } = data.loss || { ranks: [], bytes: [] };
  const NAMED = 14; // pixels that a column with an upright label has at least, so that two of them do not overlap
  let size = { left: 0, top: 0, width: 0, height: 0 }; // of the labels, and of one cell; a named column may be wider
  let edges = []; // where each column begins, and where the last one ends
  let here = null; // {row, layer} that is pointed at

  // ------------------------------------------------------------------------------------------------ what a cell says

  function classOf(copies) {
    return copies <= 1 ? Math.max(0, copies) : copies <= 16 ? Math.ceil(Math.log2(copies)) + 1 : copies <= 64 ? 6 : 7;
  }

  function copiesOf(cell) {
    const domains = countChoice.value === "domains";
    if (!roleChoice.value) return cell[domains ? DOMAINS : COPIES];
    const one = held[cell[HELD]].find(([role]) => role === roleChoice.value);
    return one ? one[domains ? 2 : 1] : null;
  }

  function bytes(n) {
    for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
      if (n < 999.995 || unit === "TB") return `${unit === "B" ? n : n.toFixed(2)} ${unit}`;
      n /= 1000;
    }
  }

  const many = (n, noun, plural = `${noun}s`) => `${n.toLocaleString("en")} ${n === 1 ? noun : plural}`;
  const kind = data.domain;

  function some(text, count) {
    const runs = text.split(",");
    return runs.length <= 4 ? runs.join(", ") : `${runs.slice(0, 4).join(", ")}, … (${many(count, "rank")})`;
  }

  function shortNames(names) { // what all numbered names begin with says nothing
    const numbered = names.filter((name) => /\.\d+$/.test(name));
    const stem = numbered.length ? numbered[0].replace(/\d+$/, "") : "";
    return names.map((name) => (stem && name.startsWith(stem) && name.length > stem.length ? name.slice(stem.length) : name));
  }

  // ------------------------------------------------------------------------------------------------------- drawing

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function sharp(canvas, width, height) { // a canvas whose units are CSS pixels on any screen
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    return pen;
  }

  function fill(pen, shade, number, x, y, width, height) {
    pen.fillStyle = shade[number];
    pen.fillRect(x, y, width, height);
    if (number === 0) { // not by colour alone
      pen.strokeStyle = shade.paper;
      pen.beginPath();
      pen.moveTo(x, y); pen.lineTo(x + width, y + height);
      pen.moveTo(x + width, y); pen.lineTo(x, y + height);
      pen.stroke();
    }
  }

  function strike(pen, shade, x, y, width, height) { // a line that shows on every colour; low cells are all line
    const thick = height < 8 ? height : Math.max(2, height / 6);
    pen.fillStyle = shade.paper;
    if (thick < height) pen.fillRect(x, y + (height - thick) / 2 - 1, width, thick + 2);
    pen.fillStyle = shade[0];
    pen.fillRect(x, y + (height - thick) / 2, width, thick);
  }

  function cut(pen, text, width) {
    if (pen.measureText(text).width <= width) return text;
    while (text.length > 1 && pen.measureText(`${text}…`).width > width) text = text.slice(0, -1);
    return `${text}…`;
  }

  function draw() {
    const shade = CLASSES.map((_, number) => colour(`--c${number}`));
    shade.paper = colour("--paper");
    const rowText = rows.map((row) => some(row.ranks, row.count));
    const probe = axis.getContext("2d");
    probe.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const widest = (texts, most) => Math.min(most, Math.ceil(Math.max(0, ...texts.map((t) => probe.measureText(t).width))));
    size.left = widest(rowText, 150) + 10;
    size.top = widest(label, 130) + 10 + BAR;
    const room = map.parentElement.clientWidth - size.left - EDGE;
    const names = numbered.filter((one) => !one).length;
    const even = room / Math.max(1, layers.length);
    const narrow = (room - names * NAMED) / Math.max(1, layers.length - names);
    size.width = Math.max(5, Math.min(64, even < NAMED ? narrow : even));
    edges = [size.left];
    numbered.forEach((one, x) => edges.push(edges[x] + (one ? size.width : Math.max(NAMED, size.width))));
    size.height = Math.max(3, Math.min(28, Math.floor(620 / Math.max(1, rows.length))));
    const right = edges[layers.length];
    const width = right + EDGE;
    map.classList.toggle("wide", width > map.parentElement.clientWidth + 1);

    drawAxis(sharp(axis, width, size.top));
    const pen = sharp(cells, width, size.height * rows.length + EDGE);
    pen.fillStyle = colour("--empty");
    pen.fillRect(size.left, 0, right - size.left, size.height * rows.length);
    const gap = size.width >= 8 ? 1 : 0;
    const slit = size.height >= 6 ? 1 : 0;
    const used = CLASSES.map(() => 0);
    rows.forEach((row, y) => {
      for (const cell of row.cells) {
        const copies = copiesOf(cell);
        if (copies === null) continue;
        const number = classOf(copies);
        used[number] += 1;
        const [x, next] = [edges[cell[LAYER]], edges[cell[LAYER] + 1]];
        fill(pen, shade, number, x, y * size.height, next - x - gap, size.height - slit);
        if (lostRanks[y]) strike(pen, shade, x, y * size.height, next - x, size.height - slit);
      }
    });
    pen.fillStyle = shade.paper;
    rows.forEach((row, y) => { // a line between what fails together, where it hides nothing
      if (size.height >= 4 && y && row.domains !== rows[y - 1].domains && kind !== "rank") {
        pen.fillRect(size.left, y * size.height - 1, width - size.left, 1.5);
      }
    });
    pen.textAlign = "right";
    const every = Math.ceil(13 / size.height);
    rowText.forEach((text, y) => {
      if (y % every && !(lostRanks[y] && !lostRanks[y - 1])) return;
      if (lostRanks[y - 1] && !lostRanks[y] && every > 1) return; // the label of what is lost comes first
      pen.fillStyle = colour(lostRanks[y] ? "--warn" : "--quiet");
      pen.fillText(cut(pen, text, size.left - 8), size.left - 6, y * size.height + Math.max(6, size.height / 2));
    });
    drawLegend(shade, used);
    cells.dataset.cells = used.reduce((a, b) => a + b, 0);
    Object.assign(cells.dataset, { edges: edges.join(","), cellHeight: size.height });
    cells.setAttribute("aria-label",
      `Heat map: ${many(rows.length, "row")} of ranks by ${many(layers.length, "layer")}, coloured by number of copies`);
  }

  function drawAxis(pen) {
    pen.fillStyle = colour("--quiet");
    const numbers = label.filter((_, x) => numbered[x]);
    const widest = Math.max(0, ...numbers.map((text) => pen.measureText(text).width));
    const every = [1, 2, 5, 10, 20, 50, 100].find((step) => step * size.width >= widest + 6) || 1000;
    const centre = (x) => (edges[x] + edges[x + 1]) / 2;
    const beside = (x, half) => numbered.some((one, n) => !one && Math.abs(centre(n) - centre(x)) < half + NAMED / 2);
    label.forEach((text, x) => {
      if (lostBytes[x]) {
        pen.fillStyle = colour("--c0");
        pen.fillRect(edges[x], size.top - BAR, edges[x + 1] - edges[x], BAR - 1);
      }
      if (numbered[x] && (Number(text) % every || beside(x, pen.measureText(text).width / 2))) return; // 0, 5, 10 …
      pen.fillStyle = colour(lostBytes[x] ? "--warn" : "--quiet");
      pen.save();
      pen.translate(centre(x), size.top - BAR - 3);
      if (numbered[x]) {
        pen.translate(0, -4);
        pen.textAlign = "center";
      } else {
        pen.rotate(-Math.PI / 2);
        pen.textAlign = "left";
      }
      pen.fillText(cut(pen, text, 130), 0, 0);
      pen.restore();
    });
  }

  function drawLegend(shade, used) {
    legend.replaceChildren(...CLASSES.map((text, number) => {
      const item = document.createElement("li");
      const swatch = document.createElement("canvas");
      item.append(swatch, number === 1 ? "1 copy" : text);
      item.classList.toggle("unused", !used[number]);
      item.title = many(used[number], "cell");
      fill(sharp(swatch, 14, 14), shade, number, 0, 0, 14, 14);
      return item;
    }));
    if (!data.loss) return;
    const mine = [
      ["a lost rank", true, (pen) => { fill(pen, shade, 1, 0, 0, 14, 14); strike(pen, shade, 0, 0, 14, 14); }],
      ["a layer that lost elements for good", lostBytes.some(Boolean), (pen) => { pen.fillStyle = shade[0]; pen.fillRect(0, 5, 14, BAR - 1); }],
    ];
    for (const [text, found, paint] of mine) {
      const item = document.createElement("li");
      const swatch = document.createElement("canvas");
      item.append(swatch, text);
      item.classList.toggle("unused", !found);
      legend.append(item);
      paint(sharp(swatch, 14, 14));
    }
  }

  // ------------------------------------------------------------------------------------------ pointing and walking

  function element(tag, text, parent) {
    const made = document.createElement(tag);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  function describe(row, layer) {
    const cell = at[row].get(layer);
    const { ranks, count, domains } = rows[row];
    tip.replaceChildren();
    element("b", `rank${count > 1 ? "s" : ""} ${some(ranks, count)}`, tip);
    if (kind !== "rank") element("div", `${kind}${/,|^\d+-\d+$/.test(domains) ? "s" : ""} ${domains.length > 60 ? `${domains.slice(0, 60)}…` : domains}`, tip);
    if (lostRanks[row]) {
      const lost = count > 1 ? `${lostRanks[row].toLocaleString("en")} of ${many(count, "rank")} lost` : "lost";
      element("div", lost, tip).className = "verdict bad";
    }
    element("code", layers[layer], tip);
    if (lostBytes[layer]) element("div", `${bytes(lostBytes[layer])} of it cannot be rebuilt`, tip).className = "verdict bad";
    if (!cell) {
      element("div", "holds nothing of this layer", tip);
      return;
    }
    const where = kind === "rank" ? "" : ` on ${many(cell[DOMAINS], kind)}`;
    const said = element("div", `whole state: ${many(cell[COPIES], "copy", "copies")}${where}`, tip);
    said.className = `verdict ${cell[DOMAINS] > data.k ? "good" : "bad"}`;
    said.append(cell[DOMAINS] < 1 ? ": cannot be rebuilt" : cell[DOMAINS] > data.k
      ? `: survives any ${many(cell[DOMAINS] - 1, kind)}` : ": must be written");
    const table = element("table", "", tip);
    const head = element("tr", "", table);
    for (const text of kind === "rank" ? ["role", "copies"] : ["role", "copies", `${kind}s`]) element("th", text, head);
    for (const one of held[cell[HELD]]) {
      const line = element("tr", "", table);
      one.slice(0, kind === "rank" ? 2 : 3).forEach((value) => element("td", value.toLocaleString("en"), line));
    }
    const each = count > 1 ? " on each rank" : "";
    const least = bytes(cell[LEAST]);
    const most = bytes(cell[MOST]);
    element("div", least === most ? `${most}${each}` : `${least} to ${most}${each}`, tip);
  }

  function show(row, layer) {
    if (here && here.row === row && here.layer === layer) return;
    here = { row, layer };
    describe(row, layer);
    tip.hidden = false;
    mark.style.left = `${edges[layer] - 2}px`;
    mark.style.top = `${size.top + row * size.height - 2}px`;
    mark.style.width = `${edges[layer + 1] - edges[layer] + 3}px`;
    mark.style.height = `${size.height + 3}px`;
    mark.hidden = false;
    place();
  }

  function place() { // the text beside its cell, on the side where there is room
    if (!here) return;
    const cell = mark.getBoundingClientRect();
    const right = cell.right + 8 + tip.offsetWidth < window.innerWidth;
    tip.style.left = `${Math.max(4, right ? cell.right + 8 : cell.left - 8 - tip.offsetWidth)}px`;
    const under = cell.bottom + 6 + tip.offsetHeight < window.innerHeight;
    tip.style.top = `${Math.max(4, under ? cell.bottom + 6 : cell.top - 6 - tip.offsetHeight)}px`;
  }

  function hide() {
    here = null;
    tip.hidden = mark.hidden = true;
  }

  let waiting = false;
  function frame() { // at most one drawing for each picture that is shown
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; hide(); draw(); });
  }

  cells.addEventListener("pointermove", (event) => {
    const layer = edges.findLastIndex((edge) => edge <= event.offsetX);
    const row = Math.floor(event.offsetY / size.height);
    if (layer >= 0 && layer < layers.length && row >= 0 && row < rows.length) show(row, layer);
    else hide();
  });
  cells.addEventListener("pointerleave", hide);
  cells.addEventListener("focus", () => { if (!here && cells.matches(":focus-visible") && layers.length) show(0, 0); });
  cells.addEventListener("blur", hide);
  cells.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-16, 0],
      PageDown: [16, 0], Home: [0, -layers.length], End: [0, layers.length] }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !layers.length || !rows.length) return;
    event.preventDefault();
    const { row, layer } = here || { row: 0, layer: 0 };
    const inside = (value, length) => Math.max(0, Math.min(length - 1, value));
    show(inside(row + step[0], rows.length), inside(layer + step[1], layers.length));
    mark.scrollIntoView({ block: "nearest", inline: "nearest" });
  });

  for (const role of new Set(held.flatMap((list) => list.map(([name]) => name)))) {
    element("option", role, roleChoice).value = role;
  }
  document.addEventListener("scroll", place, { capture: true, passive: true });
  roleChoice.addEventListener("change", frame);
  countChoice.addEventListener("change", frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", frame);
  new ResizeObserver(frame).observe(map.parentElement);
  draw();
})();
