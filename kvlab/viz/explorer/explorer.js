// The explorer: one ES module for notebooks (anywidget calls render) and for a page (mount). It asks for nothing else.
//
// A scene is {kind, data, knobs}; a state is {knob: value}. drawn(scene, state) is the picture: a pure function of both.
// A knob is {low, high} (a slider) or {options} (a choice), with what it is called in `label`.
const ACCENT = "var(--kvlab-accent,#c4006a)", ALARM = "var(--kvlab-alarm,#c9201c)", PAPER = "var(--kvlab-paper,#fff)";
const MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace";
const BANK = ["#5845a4", "#6252ad", "#6d5fb4", "#776db7", "#d69468", "#e1a177", "#ebaf89", "#f2bd9c", "#936295", "#9e6ea0", "#a87caa", "#b08ab2", "#bacd66", "#c7da78", "#d4e78d", "#e2f3a6",
  "#538f6b", "#619a77", "#72a685", "#84b194", "#d6a3d0", "#e1b1dc", "#ecbfe6", "#f5cdf0", "#955303", "#9f6021", "#a86d37", "#af7b4e", "#5f93e1", "#6da0eb", "#7eadf2", "#90b9f7"];
const QUADS = ["#d5d2f2", "#fbe0cf", "#e6d3e6", "#eaf3c9", "#cfe6d8", "#f6dff3", "#ead8c6", "#d3e4fb"];
const HUES = BANK.filter((_, i) => i % 4 === 0);
const luminance = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
  const v = parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16) / 255;
  return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
}, 0);
const INKS = new Map(BANK.map((colour) => [colour, luminance(colour) > 0.179 ? "#000" : "#fff"])); // the larger contrast
const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const range = (n) => Array.from({length: n}, (_, i) => i);
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

// ---- SVG text
const safe = (text) => String(text).replace(/[&<>"]/g, (c) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const tag = (name, marks, inside = "") => {
  const words = Object.entries(marks).filter(([, v]) => v !== undefined);
  return `<${name} ${words.map(([k, v]) => `${k}="${typeof v === "number" ? +v.toFixed(2) : safe(v)}"`).join(" ")}>${inside}</${name}>`;
};
const rect = (x, y, width, height, marks = {}) => tag("rect", {x, y, width, height, fill: "none", ...marks});
const text = (x, y, words, marks = {}) => tag("text", {x, y, "font-size": 10, ...marks}, safe(words));
const quiet = {opacity: 0.75}, bold = {"font-weight": 600}, right = {"text-anchor": "end"}, middle = {"text-anchor": "middle"};
const box = (x, y, width, height, stroke = ACCENT, wide = 2.5) => // set off from any colour around it
  rect(x, y, width, height, {stroke: PAPER, "stroke-width": wide + 2}) + rect(x, y, width, height, {stroke, "stroke-width": wide});
const hot = (x, y, width, height, change, title) => // what sets the state when the pointer comes
  rect(x, y, width, height, {"data-set": JSON.stringify(change), "pointer-events": "all"}).replace("></rect>", title ? `><title>${safe(title)}</title></rect>` : "></rect>");
const cells = (parts) => { // [[colour, x, y, width, height]]: a path for each colour
  const paths = new Map();
  for (const [fill, x, y, w, h] of parts) paths.set(fill, (paths.get(fill) ?? "") + `M${+x.toFixed(2)} ${+y.toFixed(2)}h${+w.toFixed(2)}v${+h.toFixed(2)}h-${+w.toFixed(2)}z`);
  return [...paths].map(([fill, d]) => tag("path", {d, fill})).join("");
};
const wrapped = (x, y, words, marks = {}, room = 852, size = 11) => { // lines of text, and the y below them
  const lines = [""];
  for (const word of String(words).split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (longer.length * size * 0.56 > room) lines.push(word); else lines[lines.length - 1] = longer;
  }
  return [lines.map((line, i) => text(x, y + i * (size + 4), line, {"font-size": size, ...marks})).join(""), y + lines.length * (size + 4)];
};

// ---- the rules: the same numbers as kvlab.hardware's and kvlab.layout's
export const swizzled = (byte, {bits, base, shift}) => byte ^ ((byte & (((1 << bits) - 1) << (base + shift))) >> shift);

// op: {unit, groups, phases, shares, merges, repeats}; address [lanes], -1 for a lane that does not take part.
export function wavefronts(op, address) {
  const vector = address.map((a) => (a < 0 ? -1 : Math.floor(a / op.unit)));
  const merged = op.merges && [1, 2].some((far) => vector.every((v, l) => v < 0 || vector[l ^ far] < 0 || v === vector[l ^ far]));
  const phases = merged ? range(op.phases.length / 2).map((i) => [...op.phases[2 * i], ...op.phases[2 * i + 1]]) : op.phases;
  const phase = address.map(() => -1), turn = address.map(() => -1), passes = [];
  phases.forEach((lanes, number) => {
    const queue = new Map();
    let most = 0;
    for (const lane of [...lanes].sort((a, b) => vector[a] - vector[b])) {
      if (vector[lane] < 0) continue;
      const group = vector[lane] % op.groups, waiting = queue.get(group) ?? [];
      if (!op.shares || waiting.at(-1) !== vector[lane]) waiting.push(vector[lane]);
      queue.set(group, waiting);
      phase[lane] = number;
      turn[lane] = waiting.length - 1;
      most = Math.max(most, waiting.length);
    }
    passes.push(most);
  });
  const before = passes.map((_, i) => total(passes.slice(0, i)));
  return {
    wavefronts: total(passes) * op.repeats, ideal: passes.filter((n) => n).length * op.repeats, phase, turn, passes,
    served: phase.map((p, l) => (p < 0 ? -1 : before[p] + turn[l])), // number of the pass that serves each lane
  };
}

// Byte addresses of an access [lanes], before a swizzle: rows of the tile, moved along by `column` vectors of 16 bytes.
export const logical = (access, {row_bytes, column}) =>
  access.row.map((row, lane) => (row < 0 ? -1 : row * row_bytes + ((access.byte[lane] + 16 * column) % row_bytes)));

const SCENES = {};

// ---- an access to a swizzled tile: plain beside swizzled, passes one by one
SCENES.access = {
  keys: {ArrowRight: ["step", 1], ArrowLeft: ["step", -1], ArrowDown: ["lane", 1], ArrowUp: ["lane", -1]},
  play: "step",
  last: (data, state) => Math.max(...sides(data, state).map((side) => total(side.count.passes))),
  draw(data, state) {
    const both = sides(data, state), access = data.accesses[state.access], {banks} = access, lanes = access.row.length;
    const [plain, cured] = both, name = `Sw<${state.bits},${state.base},${state.shift}>`;
    const same = state.bits ? name : "no swizzle";
    const title = `${state.access} on ${data.arch}: ${many(plain.count.wavefronts, "wavefront")} ${data.plain}, ${cured.count.wavefronts} with ${same}, ideal ${cured.count.ideal}`;
    const touched = [...new Set(both.flatMap((side) => side.address.filter((a) => a >= 0).map((a) => Math.floor(a / (4 * banks)))))].sort((a, b) => a - b);
    const rows = [...new Set([...touched, ...range(16)])].slice(0, 16).sort((a, b) => a - b);
    const piece = state.bits ? Math.min(16, 1 << state.base) : 16, W = 360, HIGH = 18, TOP = 84;
    const wide = (W * piece) / (4 * banks), CARD = TOP + 16 * HIGH + 66, lane_h = 224 / lanes, bank_w = W / banks;
    const ground = [], marks = [];
    both.forEach((side, number) => {
      const X = 60 + 428 * number, at = (a) => [X + ((a % (4 * banks)) / (4 * banks)) * W, TOP + HIGH * rows.indexOf(Math.floor(a / (4 * banks)))];
      ground.push(text(X, TOP - 22, `${side.name}: ${many(side.count.wavefronts, "wavefront")}`, {"font-size": 12, ...bold}));
      ground.push(text(X - 6, TOP - 6, "byte", {...right, ...quiet}));
      for (let group = 0; group < 8; group++) ground.push(text(X + (group + 0.5) * (W / 8), TOP - 6, `${(group * banks) / 8}–${((group + 1) * banks) / 8 - 1}`, {...middle, ...quiet}));
      const fills = [], words = [];
      rows.forEach((row, y) => {
        ground.push(text(X - 6, TOP + y * HIGH + 13, row * 4 * banks, {...right, ...quiet, "font-family": MONO}));
        for (let i = 0; i < (4 * banks) / piece; i++) {
          const origin = swizzled(row * 4 * banks + i * piece, side.swizzle), tile_row = Math.floor(origin / state.row_bytes), vector = Math.floor((origin % state.row_bytes) / 16);
          fills.push([HUES[vector % 8], X + i * wide, TOP + y * HIGH, wide - (wide > 8 ? 1 : 0), HIGH - 1]);
          if (wide >= 40) words.push(text(X + (i + 0.5) * wide - 0.5, TOP + y * HIGH + 13, `${tile_row},${vector}`, {fill: INKS.get(HUES[vector % 8]), ...middle}));
        }
      });
      ground.push(cells(fills), tag("g", {"font-family": MONO}, words.join("")));
      // ticks: one for each pass
      const ticks = total(side.count.passes), done = Math.min(state.step, ticks), tick = Math.min(11, (W + 1) / ticks), ty = TOP + 16 * HIGH + 10;
      marks.push(range(ticks).map((i) => rect(X + i * tick, ty, tick - 2, 14, {fill: i < done ? (i === done - 1 ? ACCENT : "currentColor") : "currentColor", opacity: i < done ? 1 : 0.18})).join(""));
      marks.push(text(X, ty + 28, done ? `pass ${done} of ${ticks}${done === ticks ? ": all lanes served" : ""}` : `${many(ticks, "pass").replace("passs", "passes")} to come`, {"font-size": 11}));
      // lanes in the tile
      const nbytes = access.nbytes;
      side.address.forEach((a, lane) => {
        if (a < 0 || !rows.includes(Math.floor(a / (4 * banks)))) return;
        const [x, y] = at(a), w = Math.max((nbytes / (4 * banks)) * W, 5) - 1, when = side.count.served[lane];
        if (when < done - 1) marks.push(rect(x + 1, y + 1, w - 2, HIGH - 3, {stroke: "#000", "stroke-width": 1.2}));
        else if (when === done - 1) marks.push(box(x + 1, y + 1, w - 2, HIGH - 3));
        else if (!done) marks.push(rect(x + 1, y + 1, w - 2, HIGH - 3, {stroke: "#000", "stroke-width": 1.6}));
        if (lane === state.lane) marks.push(rect(x - 1, y - 1, w + 2, HIGH + 1, {stroke: "currentColor", "stroke-width": 3}));
        marks.push(hot(x, y, w, HIGH, {lane}, `lane ${lane}: byte ${a}, bank ${Math.floor(a / 4) % banks}`));
      });
      // punch card: lanes x banks
      ground.push(text(X, CARD - 6, "lane ↓  bank →   a mark: the lane wants the bank; red: it has to wait for others", quiet));
      ground.push(rect(X, CARD, W, lanes * lane_h, {fill: "currentColor", opacity: 0.05}));
      for (let lane = 0; lane < lanes; lane += 8) ground.push(text(X - 6, CARD + lane * lane_h + 9, `T${lane}`, {...right, ...quiet}));
      const dots = {done: "", now: "", waiting: "", first: ""};
      side.address.forEach((a, lane) => {
        if (a < 0) return;
        const when = side.count.served[lane], kind = !done ? (side.count.turn[lane] ? "waiting" : "first") : when < done - 1 ? "done" : when === done - 1 ? "now" : side.count.turn[lane] ? "waiting" : "first";
        for (let word = 0; word < Math.max(nbytes, 4) / 4; word++) {
          const bank = (Math.floor(a / 4) + word) % banks;
          dots[kind] += `M${(X + bank * bank_w + 1).toFixed(1)} ${(CARD + lane * lane_h + 1).toFixed(1)}h${(bank_w - 2).toFixed(1)}v${Math.max(lane_h - 2, 2).toFixed(1)}h-${(bank_w - 2).toFixed(1)}z`;
        }
      });
      const looks = {done: ["currentColor", 0.35], now: [ACCENT, 1], waiting: [ALARM, 0.75], first: ["currentColor", 0.85]};
      for (const [kind, d] of Object.entries(dots)) if (d) marks.push(tag("path", {d, fill: looks[kind][0], opacity: looks[kind][1]}));
      for (let lane = 0; lane < lanes; lane++) {
        if (lane === state.lane) marks.push(rect(X - 1, CARD + lane * lane_h - 1, W + 2, lane_h + 2, {stroke: "currentColor", "stroke-width": 2}));
        marks.push(hot(X - 34, CARD + lane * lane_h, W + 34, lane_h, {lane}));
      }
    });
    const BITS = CARD + 224 + 34, count = Math.max(11, state.base + state.shift + state.bits);
    ground.push(text(24, BITS + 14, "bits of a byte address", quiet));
    for (let bit = count - 1; bit >= 0; bit--) {
      const x = 150 + (count - 1 - bit) * 24, from = state.bits && bit >= state.base + state.shift && bit < state.base + state.shift + state.bits, into = state.bits && bit >= state.base && bit < state.base + state.bits;
      ground.push(rect(x, BITS, 22, 20, {fill: from ? "currentColor" : "none", stroke: into ? ACCENT : "currentColor", "stroke-width": into ? 2.5 : 0.6}));
      ground.push(text(x + 11, BITS + 14, bit, {...middle, fill: from ? PAPER : "currentColor"}));
    }
    ground.push(text(150 + count * 24 + 8, BITS + 14, state.bits ? "filled bits are XORed into the outlined ones" : "no bit changes", quiet));
    const a = plain.address[state.lane], b = cured.address[state.lane];
    const words = a === undefined || a < 0 ? `T${state.lane} gives no address` :
      `T${state.lane}: row ${access.row[state.lane]}, byte ${a % state.row_bytes} of the row; plain at byte ${a}, bank ${Math.floor(a / 4) % banks}, pass ${plain.count.served[state.lane] + 1}; with ${same} at byte ${b}, bank ${Math.floor(b / 4) % banks}, pass ${cured.count.served[state.lane] + 1}`;
    marks.push(text(24, BITS + 42, words, {"font-size": 11}));
    return {title, width: 900, height: BITS + 58, layers: [ground.join(""), marks.join("")]};
  },
};
export function sides(data, state) {
  const access = data.accesses[state.access], plain = logical(access, state);
  return [
    {name: data.plain, swizzle: {bits: 0, base: 4, shift: 3}},
    {name: state.bits ? `Sw<${state.bits},${state.base},${state.shift}> (byte)` : "no swizzle", swizzle: state},
  ].map((side) => {
    const address = plain.map((a) => (a < 0 ? -1 : swizzled(a, side.swizzle)));
    return {...side, address, count: wavefronts(access, address)};
  });
}

// ---- a grid: a layout, a view in its tensor, the registers of lanes; and what lanes that go over it ask of the banks
// data: {rows, columns, offset [cells], owner [cells] or null, element [cells], start, sizes, reads: {size: op}, banks}
export function read(data, state) { // the lanes of one load: byte addresses [lanes], the cells that they take
  const op = data.reads[state.element_bytes], lanes = total(op.phases.map((lanes) => lanes.length)), across = state.direction === "along the row";
  const cell = range(lanes).map((lane) => {
    const row = state.row + (across ? 0 : lane), column = state.column + (across ? lane : 0);
    return row < data.rows && column < data.columns ? row * data.columns + column : -1;
  });
  const address = cell.map((at) => (at < 0 ? -1 : data.start + data.offset[at] * state.element_bytes));
  return {cell, address, count: wavefronts(op, address)};
}
const kept = new WeakMap(); // what a scene has drawn last of what does not change with the cell or the lane
const once = (data, key, make) => { if (kept.get(data)?.key !== key) kept.set(data, {key, text: make()}); return kept.get(data).text; };
SCENES.grid = {
  keys: {ArrowRight: ["column", 1], ArrowLeft: ["column", -1], ArrowDown: ["row", 1], ArrowUp: ["row", -1]},
  follow: (data, state, changes) => {
    const owner = data.owner && ("row" in changes || "column" in changes) ? data.owner[state.row * data.columns + state.column] : -1;
    return owner < 0 ? {} : {lane: owner};
  },
  draw(data, state) {
    const {rows, columns, offset, owner, banks} = data, X = 62, Y = 78, bytes = state.element_bytes;
    const w = Math.min(46, 814 / columns), h = Math.min(22, 520 / rows), at = (cell) => [X + (cell % columns) * w, Y + Math.floor(cell / columns) * h];
    const here = state.row * columns + state.column, ground = [], marks = [];
    const bank = (cell) => Math.floor((data.start + offset[cell] * bytes) / 4) % banks;
    const sheet = once(data, bytes, () => {
      const fills = [], words = [];
      const label = (cell) => (owner ? (owner[cell] < 0 ? "" : `T${owner[cell]}`) : `${offset[cell]}`), long = Math.max(...range(offset.length).map((cell) => label(cell).length));
      for (let cell = 0; cell < rows * columns; cell++) {
        const [x, y] = at(cell), kind = owner ? (owner[cell] < 0 ? "none" : QUADS[Math.floor(owner[cell] / 4) % 8]) : data.kept && !data.kept[cell] ? "dim" : BANK[bank(cell) % 32];
        if (kind !== "none" && kind !== "dim") fills.push([kind, x, y, w - (w > 6 ? 1 : 0), h - (h > 6 ? 1 : 0)]);
        if (kind === "dim") fills.push([BANK[bank(cell) % 32] + "38", x, y, w - (w > 6 ? 1 : 0), h - (h > 6 ? 1 : 0)]);
        if (w >= 6.1 * long + 2 && h >= 14) words.push(text(x + w / 2 - 0.5, y + h / 2 + 3, label(cell), {...middle, fill: kind === "none" || kind === "dim" ? "currentColor" : owner ? "#000" : INKS.get(kind)}));
      }
      return cells(fills) + tag("g", {"font-family": MONO}, words.join(""));
    });
    const every = (size, room) => [1, 2, 4, 8, 16, 32, 64].find((n) => n * size >= room) ?? 128;
    ground.push(text(24, Y - 22, "row ↓  column →", quiet));
    for (let c = 0; c < columns; c += every(w, 24)) ground.push(text(X + (c + 0.5) * w, Y - 6, c, {...middle, ...quiet}));
    for (let r = 0; r < rows; r += every(h, 11)) ground.push(text(X - 6, Y + (r + 0.5) * h + 3.5, r, {...right, ...quiet}));
    ground.push(rect(X, Y, w * columns, h * rows, {fill: "currentColor", opacity: 0.04}), sheet);
    const over = rect(X, Y, w * columns, h * rows, {"data-grid": JSON.stringify([["column", columns], ["row", rows]]), "pointer-events": "all"});
    const [hx, hy] = at(here), place = `row ${state.row}, column ${state.column}: offset ${offset[here]}, byte ${data.start + offset[here] * bytes}, bank ${bank(here)}`;
    let title, line;
    if (owner) {
      const mine = range(offset.length).filter((cell) => owner[cell] === state.lane);
      for (const cell of mine) { const [x, y] = at(cell); marks.push(rect(x, y, Math.max(w - 1, 2), Math.max(h - 1, 2), {fill: ACCENT, opacity: 0.35}), rect(x, y, w - 1, h - 1, {stroke: ACCENT, "stroke-width": 1.6})); }
      title = `${data.name}: ${data.who} ${state.lane} holds ${many(mine.length, "element")}`;
      line = `${data.who} ${state.lane}: ${mine.slice(0, 12).map((cell) => `(${Math.floor(cell / columns)}, ${cell % columns})`).join(" ")}${mine.length > 12 ? " …" : ""}   ·   ${owner[here] < 0 ? `row ${state.row}, column ${state.column}: nobody's` : data.bytes ? `${place}, element ${data.element[here]} of T${owner[here]}` : `row ${state.row}, column ${state.column}: element ${data.element[here]} of T${owner[here]}`}`;
    } else {
      const {cell, address, count} = read(data, state), op = data.reads[bytes];
      cell.forEach((one, lane) => { if (one >= 0) { const [x, y] = at(one); marks.push(rect(x, y, w - 1, h - 1, {stroke: count.turn[lane] ? ALARM : "currentColor", "stroke-width": 2})); } });
      title = `${data.name}: ${op.name} ${state.direction} takes ${many(count.wavefronts, "wavefront")}, ideal ${count.ideal}`;
      line = `${place}. ${many(address.filter((a) => a >= 0).length, "lane")} from here ${state.direction}: outlined, red where a lane has to wait`;
    }
    marks.push(box(hx, hy, Math.max(w - 1, 4), Math.max(h - 1, 4)));
    const [below, end] = wrapped(24, Y + h * rows + 24, line);
    marks.push(below, over);
    const told = owner ? "One hue: a quad, four neighbouring lanes." : `Colour: the bank of 4 bytes; one hue is 16 bytes.${data.kept ? " Dimmed: outside the view." : ""}`;
    ground.push(text(24, Y + h * rows + 60, told, quiet));
    return {title, width: 900, height: Math.max(end, Y + h * rows + 60) + 18, layers: [ground.join(""), marks.join("")]};
  },
};

// ---- one matrix instruction: A left, B on top, C in the corner; C slides onto A
// data: {name, shape, who, parts: {a, b, c: {rows, columns, lane, element, each} or null}, reuse: {lane, order, turned, same} or null}
SCENES.product = {
  keys: {ArrowRight: ["lane", 1], ArrowLeft: ["lane", -1], ArrowDown: ["slide", 1], ArrowUp: ["slide", -1]},
  play: "slide",
  last: () => 10,
  draw(data, state) {
    const [M, N, K] = data.shape, GAP = 34, X = 56, Y = 92, w = Math.min(36, (820 - GAP) / (K + N)), h = Math.min(18, (520 - GAP) / (K + M));
    const corner = {a: [X, Y + K * h + GAP], b: [X + K * w + GAP, Y], c: [X + K * w + GAP, Y + K * h + GAP]}, ground = [], marks = [], said = [];
    const each = (part, lane) => range(part.lane.length).filter((cell) => part.lane[cell] === lane);
    const sheet = (part, [x0, y0], alpha) => {
      const fills = part.lane.map((lane, cell) => [QUADS[Math.floor(lane / 4) % 8], x0 + (cell % part.columns) * w, y0 + Math.floor(cell / part.columns) * h, w - (w > 5 ? 1 : 0), h - (h > 5 ? 1 : 0)]);
      let out = cells(fills);
      const words = part.lane.map((lane, cell) => { const name = `T${lane}`; return w >= 6.1 * name.length + 2 && h >= 13 ? text(x0 + (cell % part.columns + 0.5) * w - 0.5, y0 + (Math.floor(cell / part.columns) + 0.5) * h + 3, name, {...middle, fill: "#000"}) : ""; });
      out += tag("g", {"font-family": MONO}, words.join(""));
      return alpha === 1 ? out : tag("g", {opacity: alpha}, out);
    };
    const lit = (part, [x0, y0], lane) => each(part, lane).map((cell) => rect(x0 + (cell % part.columns) * w, y0 + Math.floor(cell / part.columns) * h, Math.max(w - 1, 3), Math.max(h - 1, 3), {stroke: ACCENT, "stroke-width": Math.min(2.5, h / 3), fill: ACCENT, "fill-opacity": 0.3})).join("");
    const axes = {a: "A   m ↓  k →", b: "B   k ↓  n →", c: "C   m ↓  n →"}, slid = state.slide / 10;
    for (const name of ["a", "b", "c"]) {
      const part = data.parts[name], [x, y] = corner[name], rows = name === "b" ? K : M, columns = name === "a" ? K : N;
      ground.push(text(x, y - 8, `${axes[name]}   ${rows} x ${columns}`, {"font-size": 11, ...bold}));
      if (part) { if (name !== "a" || slid < 1) ground.push(sheet(part, corner[name], 1)); marks.push(lit(part, corner[name], state.lane)); said.push(`${name.toUpperCase()}: ${part.registers[state.lane]}`); }
      else ground.push(rect(x, y, columns * w, rows * h, {fill: "currentColor", "fill-opacity": 0.05, stroke: "currentColor", "stroke-width": 0.6}), ...(columns * w > 150 ? [text(x + 8, y + (rows * h) / 2, "in shared memory", quiet)] : []));
      if (part) marks.push(rect(x, y, columns * w, rows * h, {"data-lanes": name, "pointer-events": "all"}));
    }
    let told = "", title = `${data.name}: ${data.who} ${state.lane} holds ${["a", "b", "c"].filter((name) => data.parts[name]).map((name) => `${each(data.parts[name], state.lane).length} of ${name.toUpperCase()}`).join(", ")}`;
    if (data.reuse) {
      const {reuse} = data, all = reuse.lane.length, straight = reuse.order.every((k, i) => k === i);
      told = reuse.same === all ? `P needs no shuffle: each element of ${reuse.turned ? "C turned" : "C"} lies in the ${data.who} that A wants${straight ? "" : `, if the keys of A and V come in the order ${runs(reuse.order)}`}.`
        : `Only ${reuse.same} of ${all} elements of C lie in the ${data.who} that A wants: P has to be moved.`;
      if (state.slide) {
        title = `${data.name}: ${told.split(":")[0]}${straight || reuse.same !== all ? "" : ", with the keys in another order"}`;
        const from = corner.c, to = corner.a, x = from[0] + (to[0] - from[0]) * slid, y = from[1] + (to[1] - from[1]) * slid, part = {rows: M, columns: K, lane: reuse.lane};
        marks.push(sheet(part, [x, y], slid === 1 ? 1 : 0.85), rect(x, y, K * w, M * h, {stroke: ACCENT, "stroke-width": 2.5}), lit(part, [x, y], state.lane));
        if (slid === 1) {
          const wrong = reuse.lane.map((lane, cell) => (lane === data.parts.a.lane[cell] ? -1 : cell)).filter((cell) => cell >= 0);
          marks.push(wrong.map((cell) => { const cx = x + (cell % K + 0.5) * w, cy = y + (Math.floor(cell / K) + 0.5) * h; return tag("path", {d: `M${(cx - 3).toFixed(1)} ${(cy - 3).toFixed(1)}l6 6m0 -6l-6 6`, stroke: ALARM, "stroke-width": 1.6}); }).join(""));
        }
      }
    } else told = data.parts.a ? "" : "A comes from shared memory: P is written there between the two products.";
    let y = Y + (K + M) * h + GAP + 26;
    for (const line of [told, ...said].filter((line) => line)) { const [lines, end] = wrapped(24, y, line); marks.push(lines); y = end; }
    return {title, width: 900, height: y + 10, layers: [ground.join(""), marks.join("")]};
  },
};
const runs = (order) => { // 0–3, 8–11, 4–7
  const found = [];
  for (const k of order) if (found.length && found.at(-1)[1] === k - 1) found.at(-1)[1] = k; else found.push([k, k]);
  return found.slice(0, 8).map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ") + (found.length > 8 ? ", …" : "");
};

// ---- a pipeline: events by stage; below, the shared memory at one of them
// data: {chunk, chunks, columns, bytes, lanes: [[name, stage]], names, removed, runs: [{events: [[kind, what, stage, warps, bytes, cells]], fault}]}
const ORDERING = ["wait", "barrier", "arrive", "expect", "commit", "fence"];
const laneOf = (data, name, stage) => data.lanes.findIndex(([n, s]) => n === name && s === stage);
export function memoryAt(data, run, event) { // each cell: state (0 nobody's, 1 in flight, 2 landed, 3 read), and whose
  const state = new Uint8Array(data.chunks), whose = new Int16Array(data.chunks).fill(-1), flying = [];
  const fill = (ranges, value, lane, only) => { for (const [a, b] of ranges) for (let i = a; i < b; i++) if (only === undefined || state[i] === only) { state[i] = value; if (lane >= 0) whose[i] = lane; } };
  for (const [kind, what, stage, , , ranges] of run.events.slice(0, event)) {
    const lane = laneOf(data, what.split(" ")[0], stage);
    if (kind === "copy") { fill(ranges, 1, lane); flying.push({what, stage, ranges}); }
    else if (kind === "write") fill(ranges, 2, lane);
    else if (kind.startsWith("read")) fill(ranges, 3, -1, 2);
    else if (kind === "landed") { const at = flying.findIndex((one) => one.what === what && one.stage === stage); if (at >= 0) fill(flying.splice(at, 1)[0].ranges, 2, -1, 1); }
  }
  return {state, whose};
}
SCENES.pipeline = {
  keys: {ArrowRight: ["event", 1], ArrowLeft: ["event", -1]},
  play: "event",
  last: (data, state) => { const run = data.runs[data.names.indexOf(state.without)]; return run.events.length + (run.fault ? 1 : 0); },
  draw(data, state) {
    const number = data.names.indexOf(state.without), run = data.runs[number], {events, fault} = run, end = events.length + (fault ? 1 : 0);
    const now = Math.min(state.event, end), failed = fault && now === end, X = 118, Y = 84, LANE = 28, px = Math.min(26, 750 / (end + 1)), ground = [], marks = [];
    const x = (i) => X + (i + 0.5) * px, y = (lane) => Y + 18 + lane * LANE, bottom = y(data.lanes.length), hue = (lane) => HUES[lane % 8];
    ground.push(text(X, Y - 16, "the program's order →", quiet), text(24, Y + 4, "all warps", {"font-size": 11}));
    data.lanes.forEach(([name, stage], lane) => ground.push(text(24, y(lane) + 15, stage === null ? name : `${name}, stage ${stage}`, {"font-size": 11}), rect(X, y(lane) + LANE - 3, (end + 1) * px, 0.8, {fill: "currentColor", opacity: 0.2})));
    const bars = []; // copies: from, landed, until
    events.forEach(([kind, what, stage], i) => {
      const lane = laneOf(data, what.split(" ")[0], stage);
      if (kind === "copy" || kind === "write") { for (const bar of bars) if (bar.lane === lane && bar.until === undefined) bar.until = i; bars.push({lane, what, from: i, landed: kind === "write" ? i : undefined}); }
      if (kind === "landed") { const bar = bars.find((one) => one.lane === lane && one.what === what && one.landed === undefined); if (bar) bar.landed = i; }
    });
    for (const {lane, from, landed, until} of bars) {
      const stop = until ?? end, solid = landed ?? stop;
      if (solid > from) ground.push(rect(x(from), y(lane) + 3, (solid - from) * px, 16, {fill: hue(lane), opacity: 0.3}), rect(x(from), y(lane) + 3, (solid - from) * px, 16, {stroke: "currentColor", "stroke-dasharray": "4 3"}));
      if (landed !== undefined && stop > landed) ground.push(rect(x(landed), y(lane) + 3, (stop - landed) * px, 16, {fill: hue(lane)}));
    }
    events.forEach(([kind, what, stage, warps, bytes], i) => {
      const cx = x(i), lane = laneOf(data, what.split(" ")[0], stage), ly = ORDERING.includes(kind) ? Y : y(lane) + 11;
      if (kind === "barrier") ground.push(rect(cx - 0.6, Y - 8, 1.2, bottom - Y + 8, {fill: "currentColor", opacity: 0.5}), rect(cx - 3.5, Y - 6, 7, 12, {fill: "currentColor"}));
      else if (kind === "wait") ground.push(tag("path", {d: `M${cx} ${Y - 6}l6 6l-6 6l-6 -6z`, fill: PAPER, stroke: "currentColor", "stroke-width": 1.6}));
      else if (ORDERING.includes(kind)) ground.push(rect(cx - 0.8, Y - 5, 1.6, 10, {fill: "currentColor", opacity: 0.6}));
      else if (kind.startsWith("read")) ground.push(rect(cx - 2.6, ly - 11, 5.2, 22, {fill: PAPER}), rect(cx - 1.3, ly - 11, 2.6, 22, {fill: "currentColor"}));
      else if (kind === "write") ground.push(tag("path", {d: `M${cx} ${ly + 8}l-5 -9h10z`, fill: "currentColor"}));
    });
    if (data.removed[number] >= 0) { const cx = x(data.removed[number] - 0.5); marks.push(tag("path", {d: `M${cx} ${Y - 9}V${bottom}`, stroke: ALARM, "stroke-width": 1.6, "stroke-dasharray": "3 3"}), tag("path", {d: `M${cx - 5} ${Y - 5}l10 10m0 -10l-10 10`, stroke: ALARM, "stroke-width": 2.4})); }
    if (fault?.lane && laneOf(data, ...fault.lane) >= 0) { const cx = x(end - 1), cy = y(laneOf(data, ...fault.lane)) + 11; marks.push(tag("path", {d: `M${cx - 7} ${cy - 7}l14 14m0 -14l-14 14`, stroke: ALARM, "stroke-width": 3})); }
    marks.push(box(x(now - 1) - px / 2, Y - 11, px, bottom - Y + 12, failed ? ALARM : ACCENT, 2));
    for (let i = 0; i < end; i++) marks.push(hot(X + i * px, Y - 12, px, bottom - Y + 12, {event: i + 1}, events[i] ? `event ${i}: ${events[i][1]}${events[i][4] ? `, ${events[i][4]} bytes` : ""}\n${events[i][3]}` : fault.words));
    // the memory
    const {state: cell, whose} = memoryAt(data, run, now), rows = Math.ceil(data.chunks / data.columns), w = 780 / data.columns, h = Math.min(data.bytes ? 14 : 22, 330 / rows), M = bottom + 52, MX = 70;
    ground.push(text(24, M - 24, data.bytes ? `shared memory after this event: a cell is ${data.chunk} bytes` : "the stages after this event", {"font-size": 12, ...bold}));
    for (let r = 0; r < rows; r++) if (h >= 11 || r % 2 === 0) ground.push(text(MX - 6, M + r * h + h / 2 + 3.5, data.bytes ? r * data.columns * data.chunk : `${data.lanes[r][0]}${data.lanes[r][1] ?? ""}`, {...right, ...quiet, "font-family": MONO}));
    const parts = {}, at = (i) => [MX + (i % data.columns) * w, M + Math.floor(i / data.columns) * h], put = (key, i, inset = 0) => { const [cx, cy] = at(i); (parts[key] ??= []).push(["", cx + inset, cy + inset, w - 1 - 2 * inset, h - 1 - 2 * inset]); };
    for (let i = 0; i < data.chunks; i++) { if (!cell[i]) put("0", i); else { put(`${cell[i]} ${whose[i]}`, i); if (cell[i] === 3) put("ring", i, 2); if (cell[i] === 1) put("dash", i, 0.5); } }
    const path = (key, more) => tag("path", {d: cells(parts[key]).match(/ d="([^"]*)"/)[1], ...more});
    marks.push(`<defs><pattern id="kvlab-nobody" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V6" stroke="currentColor" stroke-opacity=".38"/></pattern></defs>`);
    for (const key of Object.keys(parts)) {
      if (key === "0") marks.push(path(key, {fill: "url(#kvlab-nobody)"}));
      else if (key === "ring") marks.push(path(key, {fill: "none", stroke: "#000", "stroke-width": 1}));
      else if (key === "dash") marks.push(path(key, {fill: "none", stroke: "currentColor", "stroke-dasharray": "3 2", "stroke-width": 0.8}));
      else marks.push(path(key, {fill: hue(+key.split(" ")[1]), opacity: key[0] === "1" ? 0.4 : 1}));
    }
    const outline = (ranges, stroke) => range(rows).flatMap((r) => ranges.map(([a, b]) => [Math.max(a, r * data.columns), Math.min(b, (r + 1) * data.columns)]).filter(([a, b]) => a < b)).slice(0, 400)
      .map(([a, b]) => { const [cx, cy] = at(a); return rect(cx, cy, (b - a) * w - 1, h - 1, {stroke, "stroke-width": 2}); }).join("");
    marks.push(outline(failed ? fault.cells : events[now - 1]?.[5] ?? [], failed ? ALARM : ACCENT));
    let line = M + rows * h + 22;
    const keys = [["url(#kvlab-nobody)", "nobody wrote here", 1], [HUES[0], "in flight", 0.4], [HUES[0], "landed", 1], ["ring", "read", 1]];
    let kx = MX;
    for (const [fill, words, opacity] of keys) { ground.push(rect(kx, line - 10, 12, 12, {fill: fill === "ring" ? HUES[0] : fill, opacity, stroke: "currentColor", "stroke-width": 0.5}), fill === "ring" ? rect(kx + 2.5, line - 7.5, 7, 7, {stroke: "#000"}) : "", text(kx + 18, line, words, quiet)); kx += 40 + words.length * 6; }
    line += 24;
    const event = events[now - 1], told = failed ? `✕ ${fault.words}` : !now ? "before the first event" : `event ${now - 1}: ${event[1]}${event[4] ? `, ${event[4]} bytes` : ""}${event[3] ? `, ${event[3]}` : ""}${event[0] === "copy" ? ": in flight from now on" : event[0] === "landed" ? " has landed" : ""}`;
    const [below, low] = wrapped(24, line, told, failed ? {fill: ALARM, ...bold} : {});
    marks.push(below);
    const title = number ? `Without ${state.without}: ${fault ? `${fault.kind}${fault.missing ? `; cure: ${fault.missing}` : ""}` : "nothing goes wrong, another wait or barrier covers it"}` : `${many(events.filter(([kind]) => kind === "copy").length, "copy").replace("copys", "copies")}, ${many(events.filter(([kind]) => kind.startsWith("read")).length, "read")}${data.bytes ? ": every wait is there" : ""}`;
    return {title, width: 900, height: Math.max(low, line + 34) + 8, layers: [ground.join(""), marks.join("")]};
  },
};

// ---- a paged cache: token -> logical page -> page of the pool -> slot -> byte
// data: {table [sequences][columns], lengths, page_size, pages, strides [page, slot, head, element] in bytes, itemsize, heads, depth}
export function byteOf(data, {sequence, token, head, element}) {
  const at = Math.min(token, data.lengths[sequence] - 1), column = Math.floor(at / data.page_size), page = data.table[sequence][column], slot = at % data.page_size;
  const terms = [page, slot, head, element].map((index, i) => index * data.strides[i]);
  return {token: at, column, page, slot, terms, byte: page >= 0 && page < data.pages ? total(terms) : -1};
}
const around = (at, count, room) => { const first = Math.max(0, Math.min(at - Math.floor(room / 2), count - room)); return range(Math.min(room, count)).map((i) => first + i); };
SCENES.pages = {
  keys: {ArrowRight: ["token", 1], ArrowLeft: ["token", -1], ArrowDown: ["element", 1], ArrowUp: ["element", -1]},
  play: "token",
  last: (data, state) => data.lengths[state.sequence] - 1,
  draw(data, state) {
    const {token, column, page, slot, terms, byte} = byteOf(data, state), X = 110, ground = [], marks = [], W = 46, H = 24, Y = 86;
    const sequences = around(state.sequence, data.lengths.length, 6), columns = around(column, data.table[0].length, 16), owner = new Map();
    data.lengths.forEach((length, s) => { for (let c = 0; c * data.page_size < length; c++) owner.set(data.table[s][c], [s, c]); });
    ground.push(text(X, Y - 26, "page table: logical page →, in each the page of the pool", quiet));
    columns.forEach((c, i) => ground.push(text(X + (i + 0.5) * W, Y - 8, c, {...middle, ...quiet})));
    let from, to;
    sequences.forEach((s, row) => {
      const y = Y + row * (H + 6);
      ground.push(text(24, y + 16, `sequence ${s}`, {"font-size": 11, ...(s === state.sequence ? bold : {})}));
      columns.forEach((c, i) => {
        const tokens = Math.max(0, Math.min(data.page_size, data.lengths[s] - c * data.page_size)), x = X + i * W, hue = HUES[s % 8];
        ground.push(rect(x, y, W - 3, H, {fill: "currentColor", opacity: 0.06}));
        if (tokens) { ground.push(rect(x, y, ((W - 3) * tokens) / data.page_size, H, {fill: hue})); ground.push(text(x + W / 2 - 1.5, y + 16, data.table[s][c], {...middle, "font-family": MONO, fill: tokens * 2 > data.page_size ? INKS.get(hue) : "currentColor", ...(tokens * 2 > data.page_size ? {} : {stroke: PAPER, "stroke-width": 3, "paint-order": "stroke"})})); }
        if (s === state.sequence && c === column) { marks.push(box(x, y, W - 3, H)); from = [x + W / 2, y + H]; }
        if (tokens) marks.push(hot(x, y, W - 3, H, {sequence: s, token: Math.min(data.lengths[s] - 1, c * data.page_size + slot)}, `sequence ${s}, logical page ${c}: tokens ${c * data.page_size}–${c * data.page_size + tokens - 1}`));
      });
    });
    const P = Y + sequences.length * (H + 6) + 56, across = 16, shown = around(Math.floor(page / across), Math.ceil(data.pages / across), 5);
    ground.push(text(24, P + 16, "pool", {"font-size": 11, ...bold}), text(X, P - 10, `${data.pages} pages; in each the sequence and its logical page`, quiet));
    shown.forEach((line, row) => range(across).forEach((i) => {
      const number = line * across + i, x = X + i * W, y = P + row * (H + 6), whose = owner.get(number);
      if (number >= data.pages) return;
      if (whose) { const hue = HUES[whose[0] % 8]; ground.push(rect(x, y, W - 3, H, {fill: hue}), text(x + W / 2 - 1.5, y + 16, `${whose[0]}:${whose[1]}`, {...middle, "font-family": MONO, fill: INKS.get(hue)})); }
      else ground.push(rect(x, y, W - 3, H, {stroke: "currentColor", "stroke-width": 0.6, "stroke-dasharray": "3 3"}), text(x + W / 2 - 1.5, y + 16, number, {...middle, opacity: 0.75}));
      if (number === page) { marks.push(box(x, y, W - 3, H)); to = [x + W / 2, y]; }
    }));
    if (from && to) marks.push(tag("path", {d: `M${from[0]} ${from[1]}C${from[0]} ${from[1] + 36} ${to[0]} ${to[1] - 36} ${to[0]} ${to[1]}`, fill: "none", stroke: PAPER, "stroke-width": 4}), tag("path", {d: `M${from[0]} ${from[1]}C${from[0]} ${from[1] + 36} ${to[0]} ${to[1] - 36} ${to[0]} ${to[1]}`, fill: "none", stroke: ACCENT, "stroke-width": 1.8}));
    const D = P + shown.length * (H + 6) + 44, slots = around(slot, data.page_size, 16), h = 11, w = Math.min(10, 640 / data.depth);
    ground.push(text(24, D + 10, `page ${page}`, {"font-size": 11, ...bold}), text(X, D - 10, `head ${state.head} of the page: slot ↓  element →`, quiet));
    slots.forEach((one, i) => {
      const valid = column * data.page_size + one < data.lengths[state.sequence], y = D + i * h;
      if (i % 2 === 0) ground.push(text(X - 6, y + 9, one, {...right, ...quiet}));
      ground.push(rect(X, y, data.depth * w, h - 1, valid ? {fill: HUES[state.sequence % 8], opacity: 0.35} : {stroke: "currentColor", "stroke-width": 0.5, "stroke-dasharray": "3 3"}));
      if (one === slot) { marks.push(rect(X, y, data.depth * w, h - 1, {fill: ACCENT, opacity: 0.35})); marks.push(box(X + state.element * w, y, Math.max(w, 4), h - 1, ACCENT, 2)); }
    });
    const names = ["page", "slot", "head", "element"], indices = [page, slot, state.head, state.element], end = D + slots.length * h + 26;
    marks.push(text(24, end, `token ${token}: logical page ${token} ÷ ${data.page_size} = ${column}, slot ${slot}; the table says page ${page}`, {"font-size": 12}));
    marks.push(text(24, end + 20, `byte of the view = ${names.map((name, i) => `${name} ${indices[i]} × ${data.strides[i].toLocaleString("en")}`).join(" + ")} = ${byte.toLocaleString("en")}`, {"font-size": 12, ...bold}));
    const title = `Token ${token} of sequence ${state.sequence} lies in page ${page}, slot ${slot}; element ${state.element} of head ${state.head} at byte ${byte.toLocaleString("en")}`;
    return {title, width: 900, height: end + 38, layers: [ground.join(""), marks.join("")]};
  },
};

// ---- a byte budget: what a decode step of one layer moves, and its time under the roofline
// data: {query_heads, kv_heads, head_dim, bandwidth, compute, shared, sizes, conflict, points: [{name, flops, bytes, seconds, compute}]}
export function spent(data, {log2_batch, log2_context, page_size, dtype, shared_memory}) {
  const batch = 2 ** log2_batch, context = 2 ** log2_context, size = data.sizes[dtype], keys = batch * context, token = 2 * data.kv_heads * data.head_dim * size;
  const pages = batch * Math.ceil(context / page_size), bytes = keys * token + 4 * pages + 2 * batch * data.query_heads * data.head_dim * Math.max(2, size);
  const flops = 4 * keys * data.query_heads * data.head_dim, passes = Math.floor((keys * token) / 128) * (shared_memory === "plain" ? data.conflict[dtype] : 1);
  const times = [["DRAM", bytes / data.bandwidth], ["tensor cores", flops / data.compute], ...(data.shared ? [["shared memory", (128 * passes) / data.shared]] : [])];
  const [bound, seconds] = times.reduce((a, b) => (b[1] > a[1] ? b : a));
  return {batch, context, bytes, held: pages * page_size * token, flops, passes, times, seconds, bound};
}
const short = (value, units) => { let i = 0; while (value >= 1000 && i < units.length - 1) { value /= 1000; i++; } return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ${units[i]}`; };
const bytesOf = (n) => short(n, ["bytes", "kB", "MB", "GB", "TB"]), timeOf = (s) => short(s * 1e6, ["µs", "ms", "s"]);
SCENES.budget = {
  keys: {ArrowRight: ["log2_context", 1], ArrowLeft: ["log2_context", -1], ArrowUp: ["log2_batch", 1], ArrowDown: ["log2_batch", -1]},
  draw(data, state) {
    const now = spent(data, state), X = 70, Y = 84, W = 500, H = 340, ground = [], marks = [];
    const rates = [...data.points.map((p) => p.flops / p.seconds), data.compute, ...data.points.map((p) => p.compute)], levels = [...new Set(data.points.map((p) => p.compute).concat(data.compute))].sort((a, b) => a - b);
    const xs = [0.1, 1e4], ys = [10 ** Math.floor(Math.log10(Math.min(1e11, ...rates))), 10 ** Math.ceil(Math.log10(Math.max(...rates) * 1.05))];
    const px = (v) => X + (W * Math.log10(v / xs[0])) / Math.log10(xs[1] / xs[0]), py = (v) => Y + H * (1 - Math.log10(v / ys[0]) / Math.log10(ys[1] / ys[0])), inside = (v) => Math.min(Math.max(v, ys[0]), ys[1]);
    for (let v = xs[0]; v <= xs[1] * 1.01; v *= 10) ground.push(rect(px(v), Y, 0.6, H, {fill: "currentColor", opacity: 0.2}), text(px(v), Y + H + 16, v >= 1 ? Math.round(v).toLocaleString("en") : v, {...middle, ...quiet}));
    for (let v = ys[0]; v <= ys[1] * 1.01; v *= 10) ground.push(rect(X, py(v), W, 0.6, {fill: "currentColor", opacity: 0.2}), text(X - 6, py(v) + 3.5, v >= 1e15 ? `${v / 1e15} P` : v >= 1e12 ? `${Math.round(v / 1e12)} T` : `${Math.round(v / 1e9)} G`, {...right, ...quiet}));
    ground.push(text(X, Y - 12, "operations a second", quiet), text(X + W, Y + H + 32, "operations for each byte of DRAM →", {...right, ...quiet}));
    for (const level of levels) ground.push(tag("path", {d: `M${px(Math.max(xs[0], ys[0] / data.bandwidth))} ${py(inside(xs[0] * data.bandwidth))}L${px(level / data.bandwidth)} ${py(level)}H${X + W}`, fill: "none", stroke: "currentColor", "stroke-width": 2}), text(X + W - 2, py(level) - 5, `tensor cores ${Math.round(level / 1e12)} TFLOP/s`, right));
    ground.push(text(px(0.6), py(0.6 * data.bandwidth) - 10, `DRAM ${(data.bandwidth / 1e12).toFixed(2)} TB/s`, {"text-anchor": "end"}));
    const dot = (x, y, r, more) => tag("circle", {cx: x, cy: y, r, ...more});
    data.points.forEach((p, i) => { const x = px(p.flops / p.bytes), y = py(p.flops / p.seconds); ground.push(dot(x, y, 4.5, {fill: HUES[7], stroke: PAPER})); if (i === state.point) marks.push(dot(x, y, 8, {fill: "none", stroke: "currentColor", "stroke-width": 2.5})); marks.push(hot(x - 8, y - 8, 16, 16, {point: i}, p.name)); });
    const [nx, ny] = [px(now.flops / now.bytes), py(inside(now.flops / now.seconds))];
    marks.push(dot(nx, ny, 8, {fill: ACCENT, stroke: PAPER, "stroke-width": 2}), text(nx + 13, ny + 16, "these sizes", {"font-size": 12, ...bold, stroke: PAPER, "stroke-width": 4, "paint-order": "stroke"}));
    const R = X + W + 56, wide = 240, most = Math.max(...now.times.map(([, t]) => t));
    ground.push(text(R, Y - 12, "time that each takes; the longest bounds the step", quiet));
    now.times.forEach(([name, t], i) => { const y = Y + 8 + i * 48; marks.push(text(R, y + 8, `${name}: ${timeOf(t)}`, {"font-size": 12, ...(name === now.bound ? bold : {})}), rect(R, y + 15, wide, 14, {fill: "currentColor", opacity: 0.08}), rect(R, y + 15, Math.max(1, (wide * t) / most), 14, {fill: name === now.bound ? ACCENT : "currentColor", opacity: name === now.bound ? 1 : 0.5})); });
    const said = [`moved: ${bytesOf(now.bytes)}`, `held in pages: ${bytesOf(now.held)}`, `operations: ${short(now.flops, ["", "k", "M", "G", "T", "P"])}`, `for each byte: ${(now.flops / now.bytes).toFixed(1)}`, `passes of shared memory: ${short(now.passes, ["", "k", "M", "G", "T"])}`];
    said.forEach((one, i) => marks.push(text(R, Y + 176 + i * 20, one, {"font-size": 12})));
    let y = Y + H + 58;
    const p = data.points[state.point];
    if (p) {
      const least = Math.max(p.bytes / data.bandwidth, p.flops / p.compute);
      const [lines, end] = wrapped(24, y, `recorded: ${p.name}: ${timeOf(p.seconds)} measured, ${timeOf(least)} at the least: ${((100 * least) / p.seconds).toFixed(0)} % of the ceiling`, {}, 852, 12);
      marks.push(lines); y = end;
    }
    const title = `${now.batch.toLocaleString("en")} sequences of ${now.context.toLocaleString("en")} keys: ${bytesOf(now.bytes)} take ${timeOf(now.seconds)} at the least; ${now.bound} bound${now.bound === "tensor cores" ? "" : "s"} them`;
    return {title, width: 900, height: y + 12, layers: [ground.join(""), marks.join("")]};
  },
};

// ---- what holds a scene: controls, picture, pointer, keys
export function drawn(scene, state) {
  const {title, width, height, layers} = SCENES[scene.kind].draw(scene.data, state);
  const [lines] = wrapped(24, 26, title, bold, width - 48, 15);
  return {title, width, height, layers: [lines, ...layers]};
}

const fits = (knob, value) => (knob.options ? knob.options.includes(value) : Number.isInteger(value) && value >= knob.low && value <= knob.high);
const control = (name, knob) => knob.options?.length === 1 ? "" : knob.options
  ? `<label>${safe(knob.label)} <select name="${name}">${knob.options.map((one) => `<option>${safe(one)}</option>`).join("")}</select></label>`
  : `<label>${safe(knob.label)} <input type="range" name="${name}" min="${knob.low}" max="${knob.high}"> <output name="${name}"></output></label>`;

// model: {get() -> state, set(changes), watch(call)}
export function mount(el, scene, model) {
  const {keys = {}, play, last, follow} = SCENES[scene.kind], {knobs} = scene;
  el.classList.add("kvlab-view", "kvlab-explorer");
  el.setAttribute("role", "figure");
  el.innerHTML = `<form>${Object.entries(knobs).map(([name, knob]) => control(name, knob)).join("")}${play ? `<button type="button">▶ play</button>` : ""}</form><div class="picture" tabindex="0"></div>`;
  const form = el.querySelector("form"), picture = el.querySelector(".picture");
  for (const one of [...form.elements, picture]) one.dataset.lmSuppressShortcuts = "true"; // keys here are no commands of JupyterLab
  let svg, shown = [], timer;
  const paint = () => {
    const state = model.get(), {title, width, height, layers} = drawn(scene, state);
    for (const name in knobs) for (const one of form.querySelectorAll(`[name="${name}"]`)) {
      const value = knobs[name].power && one.tagName === "OUTPUT" ? (2 ** state[name]).toLocaleString("en") : String(state[name]);
      if (one.value !== value) one.value = value;
    }
    if (!svg || svg.childElementCount !== layers.length || svg.getAttribute("viewBox") !== `0 0 ${width} ${height}`) {
      picture.innerHTML = `<svg xmlns="http://www.w3.org/2000/svg" class="kvlab" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" fill="currentColor" font-family="system-ui,'Segoe UI','DejaVu Sans',sans-serif" style="max-width:100%;height:auto">${"<g></g>".repeat(layers.length)}</svg>`;
      svg = picture.firstElementChild;
      shown = [];
    }
    layers.forEach((layer, i) => { if (layer !== shown[i]) svg.children[i].innerHTML = layer; });
    shown = layers;
    svg.setAttribute("aria-label", title);
    el.setAttribute("aria-label", title);
  };
  const set = (changes) => {
    const state = model.get(), kept = Object.entries(changes).filter(([name, value]) => name in knobs && fits(knobs[name], value) && state[name] !== value);
    const moved = Object.fromEntries(kept);
    if (kept.length) model.set({...moved, ...follow?.(scene.data, {...state, ...moved}, moved)});
  };
  const stop = () => { clearInterval(timer); timer = undefined; };
  form.addEventListener("input", ({target}) => {
    const knob = knobs[target.name];
    if (knob) set({[target.name]: knob.options ? knob.options.find((one) => String(one) === target.value) : +target.value});
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  const point = ({target, clientX, clientY}) => {
    if (target.dataset?.set) set(JSON.parse(target.dataset.set));
    else if (target.dataset?.lanes) { // an operand of a product: the lane of the cell
      const part = scene.data.parts[target.dataset.lanes], r = target.getBoundingClientRect(), [x, y] = [(clientX - r.left) / r.width, (clientY - r.top) / r.height];
      set({lane: part.lane[Math.min(part.rows - 1, Math.floor(y * part.rows)) * part.columns + Math.min(part.columns - 1, Math.floor(x * part.columns))]});
    } else if (target.dataset?.grid) { // a grid of equal cells: [name, count] across, [name, count] down
      const [[across, columns], [down, rows]] = JSON.parse(target.dataset.grid), r = target.getBoundingClientRect();
      set({[across]: Math.min(columns - 1, Math.floor(((clientX - r.left) / r.width) * columns)), [down]: Math.min(rows - 1, Math.floor(((clientY - r.top) / r.height) * rows))});
    }
  };
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", point);
  picture.addEventListener("keydown", (event) => {
    const move = keys[event.key];
    if (!move || !(move[0] in knobs)) return;
    event.preventDefault();
    set({[move[0]]: model.get()[move[0]] + move[1]});
  });
  form.querySelector("button")?.addEventListener("click", () => {
    if (timer) return stop();
    const end = Math.min(last(scene.data, model.get()), knobs[play].high);
    if (model.get()[play] >= end) set({[play]: knobs[play].low});
    timer = setInterval(() => { const now = model.get()[play]; if (now >= end) stop(); else set({[play]: now + 1}); }, 450);
  });
  const forget = model.watch(paint);
  paint();
  return () => { stop(); forget?.(); };
}

// A page of its own: the state stands behind the # of its address.
export function page(el, scene, start) {
  const {knobs} = scene, calls = [];
  let state = {...start};
  const read = () => {
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const found = knobs[name]?.options ? knobs[name].options.find((one) => String(one) === value) : +value;
      if (name in knobs && found !== undefined && fits(knobs[name], found)) state = {...state, [name]: found};
    }
    calls.forEach((call) => call());
  };
  read();
  window.addEventListener("hashchange", read);
  return mount(el, scene, {
    get: () => state,
    set(changes) {
      state = {...state, ...changes};
      history.replaceState(null, "", `#${new URLSearchParams(Object.entries(state).filter(([name, value]) => value !== start[name]))}`);
      calls.forEach((call) => call());
    },
    watch(call) { calls.push(call); },
  });
}

// anywidget: the state stands in the traits of the model.
function render({model, el}) {
  const scene = model.get("scene"), names = Object.keys(scene.knobs);
  return mount(el, scene, {
    get: () => Object.fromEntries(names.map((name) => [name, model.get(name)])),
    set(changes) { for (const [name, value] of Object.entries(changes)) model.set(name, value); model.save_changes(); },
    watch(call) { names.forEach((name) => model.on(`change:${name}`, call)); return () => names.forEach((name) => model.off(`change:${name}`, call)); },
  });
}
export default {render};
