// What a reader sees of one exhibit: the faults of its texts and boxes, measured in the page.
//
// What is allowed, and why:
// - a pixel of difference between a text and its box, and of a shown thing's width: positions are rounded;
// - three quarters of a pixel beside a text, and about a quarter of its height above and below: the box of a line is
//   larger than its letters, which alone must not meet;
// - any contrast of what is marked inactive (WCAG 1.4.3 leaves it out);
// - texts that are hidden from those who listen: they are the halos of others.
(root) => {
  const ENOUGH = 4.5, HATCHED = 0.38;
  const faults = new Set();
  const remember = (make) => { const kept = new Map(); return (key) => { if (!kept.has(key)) kept.set(key, make(key)); return kept.get(key); }; };

  // Colours: [red, green, blue, opacity], as the browser itself reads them.
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = remember((text) => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  });
  const mix = (top, below, alpha) => top.slice(0, 3).map((v, i) => v * alpha + below[i] * (1 - alpha));
  const luminance = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255;
    return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ratio = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const opacity = remember((e) => e ? parseFloat(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1);
  const canvas = (() => {
    const probe = document.createElement("i");
    probe.style.cssText = "all:initial;color-scheme:inherit;color:Canvas";
    document.body.append(probe);
    const c = rgba(getComputedStyle(probe).color);
    probe.remove();
    return c;
  })();

  // Layers: an element, and the colour that it lays over what is below it.
  const background = remember((e) => {
    const colour = rgba(getComputedStyle(e).backgroundColor);
    return {e, colour, alpha: colour[3] * opacity(e)};
  });
  const drawn = remember((svg) => {  // the filled shapes of a picture, in the order in which they are painted
    const layers = [];
    [...svg.querySelectorAll("*")].forEach((e, order) => {
      if (!(e instanceof SVGGeometryElement) || e.closest("defs")) return;
      const style = getComputedStyle(e), hatch = style.fill.startsWith("url");
      if (style.fill === "none") return;
      const colour = rgba(hatch ? style.color : style.fill);
      const alpha = (hatch ? HATCHED : colour[3] * parseFloat(style.fillOpacity)) * opacity(e);
      if (alpha) layers.push({e, order, colour, alpha, box: e.getBBox(), way: e.getCTM().inverse()});
    });
    return layers;
  });
  const covers = ({e, box, way}, x, y) => {  // x and y count from the corner of the picture
    const at = new DOMPoint(x, y).matrixTransform(way);
    return at.x >= box.x && at.x <= box.x + box.width && at.y >= box.y && at.y <= box.y + box.height && e.isPointInFill(at);
  };
  const places = remember((svg) => new Map([...svg.querySelectorAll("*")].map((e, order) => [e, order])));

  // Texts: an element, the rectangles that it fills at the moment, the words.
  const linesOf = (node) => {  // without the spaces where a line was broken, which stand out of its box unseen
    const range = document.createRange(), lines = [];
    range.selectNodeContents(node);
    if (range.getClientRects().length < 2) return [...range.getClientRects()];
    for (const word of node.data.matchAll(/\S+/g)) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      for (const r of range.getClientRects()) {
        const last = lines.at(-1);
        if (last && Math.abs(last.top - r.top) < 2) last.width = Math.max(last.right, r.right) - last.left;
        else lines.push(DOMRect.fromRect(r));
      }
    }
    return lines;
  };
  const items = [];
  for (const e of root.querySelectorAll("svg.kvlab text:not([aria-hidden])"))
    if (e.textContent.trim()) items.push({e, svg: e.closest("svg.kvlab"), rects: () => [e.getBoundingClientRect()], text: e.textContent});
  for (const view of root === document.body ? [root] : root.querySelectorAll(".kvlab-view")) {
    const walk = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode;
      if (!node.data.trim() || node.parentElement.closest("style,script,svg")) continue;
      items.push({e: node.parentElement, rects: () => linesOf(node).filter((r) => r.width > 1), text: node.data.trim()});
    }
  }
  const quote = (item) => JSON.stringify(item.text.slice(0, 60));
  const say = (what, item) => faults.add(`${what}: ${quote(item)}`);

  // Whole and apart, before anything is scrolled.
  const frames = remember((e) => {  // the boxes around an element that cut off what is wider than they are
    const outer = e && root.contains(e) ? frames(e.parentElement) : [];
    if (!outer || !root.contains(e)) return [];
    const how = getComputedStyle(e);
    return how.display === "inline" || how.overflowX === "visible" ? outer : [e, ...outer];
  });
  const scrollers = remember((e) => {  // the boxes around an element that scroll, the page last
    if (!e) return [document.scrollingElement];
    const how = getComputedStyle(e), outer = scrollers(e.parentElement);
    const scrolls = e !== document.scrollingElement && e.scrollHeight > e.clientHeight && ["auto", "scroll"].includes(how.overflowY);
    return scrolls ? [e, ...outer] : outer;
  });
  const inSight = ({scroller, t, b}) => {
    const box = scroller.getBoundingClientRect();
    return scroller === document.scrollingElement || t < box.bottom && b > box.top;
  };
  const flat = [];
  for (const item of items) {
    const svg = item.svg?.getBoundingClientRect();
    for (const r of item.rects()) {
      const cut = frames(item.svg ?? item.e).some((frame) => {
        const outer = frame.getBoundingClientRect();
        return r.left < outer.left - 1 || r.right > outer.right + 1;
      });
      item.cut ||= cut || svg && (r.left < svg.left - 1 || r.right > svg.right + 1 || r.top < svg.top - 1 || r.bottom > svg.bottom + 1);
      flat.push({item, scroller: scrollers(item.svg ?? item.e)[0], l: r.left + 0.75, r: r.right - 0.75, t: r.top + 0.24 * r.height, b: r.bottom - 0.22 * r.height});
    }
    if (item.cut) say("clipped", item);
  }
  flat.sort((a, b) => a.t - b.t);
  flat.forEach((one, i) => {
    for (let j = i + 1; j < flat.length && flat[j].t < one.b; j++)
      if (one.item !== flat[j].item && one.l < flat[j].r && flat[j].l < one.r
          && (one.scroller === flat[j].scroller || inSight(one) && inSight(flat[j])))
        faults.add(`overlap: ${quote(one.item)} and ${quote(flat[j].item)}`);
  });
  for (const shown of root.querySelectorAll("svg.kvlab,.kvlab-view")) {
    const column = shown.parentElement;
    if (column.scrollWidth > column.clientWidth + 1 && column.clientWidth) faults.add("wider than its column");
  }
  for (const cell of root.querySelectorAll(".kvlab-view td,.kvlab-view th,.kvlab-view pre")) {
    const align = getComputedStyle(cell).textAlign;
    if (!["left", "start"].includes(align)) faults.add(`aligned ${align}: ${cell.tagName}`);
  }

  // Uncovered and dark enough on its ground. What scrolls is brought into sight first.
  const reveal = (e, rect) => {
    for (const box of scrollers(e)) {
      const r = rect(), page = box === document.scrollingElement;
      const {top, bottom} = page ? {top: 0, bottom: innerHeight} : box.getBoundingClientRect();
      const from = Math.max(top, 0), to = Math.min(bottom, innerHeight), middle = (r.top + r.bottom) / 2;
      if (page ? middle < 9 || middle > innerHeight - 9 : middle < top + 60 || middle > bottom - 60)
        box.scrollTop += middle - (page || to <= from ? innerHeight : top + bottom) / 2;
    }
  };
  const around = remember((e) => e ? [background(e), ...around(e.parentElement)] : []);
  const layers = (item, x, y) => {  // what lies above a text at a point of it, and what below, each from the top down
    if (item.svg) {
      const {left, top} = item.svg.getBoundingClientRect(), place = places(item.svg).get(item.e);
      const here = drawn(item.svg).filter((layer) => covers(layer, x - left, y - top)).reverse();
      return [here.filter((layer) => layer.order > place), [...here.filter((layer) => layer.order < place), ...around(item.svg)]];
    }
    const stack = document.elementsFromPoint(x, y), own = stack.findIndex((e) => e === item.e || e.contains(item.e));
    return [stack.slice(0, own).map(background), stack.slice(Math.max(own, 0)).map(background)];
  };
  const over = (e) => `covered by ${e.tagName} ${e.getAttribute("class") ?? ""}`.trim();
  // Over a picture, things of the page are looked for at every eighth text: what the page lays there is not smaller.
  items.filter((item) => !item.cut).forEach((item, index) => {
    const {e, svg} = item, style = getComputedStyle(e), ink = rgba(svg ? style.fill : style.color);
    const halo = svg && e.previousElementSibling?.matches("text[aria-hidden]") ? rgba(getComputedStyle(e.previousElementSibling).stroke) : null;
    const alpha = ink[3] * opacity(e) * (svg ? parseFloat(style.fillOpacity) : 1);
    item.rects().forEach((_, number) => {
      if (!svg || index % 8 === 0) reveal(e, () => item.rects()[number]);
      const r = item.rects()[number], y = (r.top + r.bottom) / 2;
      if (!svg || index % 8 === 0) {
        const top = document.elementFromPoint((r.left + r.right) / 2, y);
        if (!top) { say("outside the window", item); return; }
        if (svg && !svg.contains(top)) { say(over(top), item); return; }
      }
      let worst = 99;
      for (const part of [0.15, 0.5, 0.85]) {
        const [above, below] = layers(item, r.left + part * r.width, y), cover = above.find((layer) => layer.alpha > 0.5);
        if (cover) { say(over(cover.e), item); return; }
        const ground = below.reverse().reduce((ground, {colour, alpha}) => mix(colour, ground, alpha), canvas);
        const paper = halo ? mix(halo, ground, halo[3]) : ground;
        worst = Math.min(worst, ratio(mix(ink, paper, alpha), paper));
      }
      if (worst < ENOUGH && !e.closest("[aria-disabled=true],.inactive")) say(`contrast ${worst.toFixed(2)}`, item);
    });
  });
  return [...faults];
}
