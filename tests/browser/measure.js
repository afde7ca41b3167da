// What a reader sees of one exhibit: faults of its texts and boxes, measured in the page.
(root) => {
  const faults = [], cache = new Map(), opacities = new Map(), layers = new Map(), pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (text) => {
    if (!cache.has(text)) {
      pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data; cache.set(text, [r, g, b, a / 255]);
    }
    return cache.get(text);
  };
  const over = (top, below, alpha) => top.slice(0, 3).map((v, i) => v * alpha + below[i] * (1 - alpha));
  const luminance = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255; return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ratio = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const opacity = (e) => {
    if (!e) return 1;
    if (!opacities.has(e)) opacities.set(e, parseFloat(getComputedStyle(e).opacity) * opacity(e.parentElement));
    return opacities.get(e);
  };
  const canvas = (() => {
    const probe = document.createElement("i"); probe.style.cssText = "all:initial;color-scheme:inherit;color:Canvas";
    document.body.append(probe); const c = rgba(getComputedStyle(probe).color); probe.remove(); return c;
  })();
  const layer = (e) => {  // the colour that an element lays over what is below, its opacity, and the way to its space
    const style = getComputedStyle(e);
    if (!(e instanceof SVGElement)) { const c = rgba(style.backgroundColor); return [c, c[3] * opacity(e)]; }
    if (!(e instanceof SVGGeometryElement) || style.fill === "none") return [null, 0];
    const way = e.getScreenCTM().inverse();
    if (style.fill.startsWith("url")) return [rgba(style.color), 0.38 * opacity(e), way];
    const c = rgba(style.fill); return [c, c[3] * parseFloat(style.fillOpacity) * opacity(e), way];
  };
  const filled = (e, x, y) => {
    if (!layers.has(e)) layers.set(e, layer(e));
    const [c, a, way] = layers.get(e);
    return way && a && !e.isPointInFill(new DOMPoint(x, y).matrixTransform(way)) ? [null, 0] : [c, a];
  };
  const items = [];
  for (const text of root.querySelectorAll("svg.kvlab text:not([aria-hidden])"))
    if (text.textContent.trim()) items.push({e: text, svg: true, rects: [text.getBoundingClientRect()], text: text.textContent});
  for (const view of root === document.body ? [root] : root.querySelectorAll(".kvlab-view")) {
    const walk = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode;
      if (!node.data.trim() || node.parentElement.closest("style,script,svg")) continue;
      const range = document.createRange(); range.selectNodeContents(node);
      items.push({e: node.parentElement, rects: [...range.getClientRects()].filter((r) => r.width > 1), text: node.data.trim()});
    }
  }
  for (const {e, svg, rects, text} of items) {
    const style = getComputedStyle(e), say = (what) => faults.push(`${what}: ${JSON.stringify(text.slice(0, 60))}`);
    const inactive = e.closest("[aria-disabled=true],.inactive");
    for (const r of rects) {
      for (let box = svg ? e.closest("svg") : e; box && root.contains(box); box = box.parentElement) {
        const outer = box.getBoundingClientRect(), how = getComputedStyle(box);
        if (box !== e.closest("svg") && (how.display === "inline" || how.overflowX === "visible")) continue;
        if (r.left < outer.left - 1 || r.right > outer.right + 1) { say("clipped"); break; }
        if ((box === e.closest("svg")) && (r.top < outer.top - 1 || r.bottom > outer.bottom + 1)) { say("clipped"); break; }
      }
      let worst = 99;
      const halo = svg && e.previousElementSibling?.matches("text[aria-hidden]") ? rgba(getComputedStyle(e.previousElementSibling).stroke) : null;
      for (const part of [0.15, 0.5, 0.85]) {
        const x = r.left + part * r.width, y = r.top + 0.5 * r.height, stack = document.elementsFromPoint(x, y);
        if (!stack.length) { say("outside the window"); break; }
        const own = stack.findIndex((s) => s === e || s.contains(e));
        const above = stack.slice(0, Math.max(own, 0)).find((s) => s.tagName !== "text" && filled(s, x, y)[1] > 0.5);
        if (above) { say(`covered by ${above.tagName} ${above.getAttribute("class") ?? ""}`.trim()); break; }
        let ground = canvas;
        for (const s of stack.slice(Math.max(own, 0)).reverse()) { const [c, a] = filled(s, x, y); if (c && a) ground = over(c, ground, a); }
        if (halo) ground = over(halo, ground, halo[3]);
        const ink = rgba(svg ? style.fill : style.color);
        worst = Math.min(worst, ratio(over(ink, ground, ink[3] * opacity(e) * (svg ? parseFloat(style.fillOpacity) : 1)), ground));
      }
      if (worst < 4.45 && !inactive) say(`contrast ${worst.toFixed(2)}`);
    }
  }
  const flat = items.flatMap((item) => item.rects.map((r) => ({item, l: r.left + 0.75, r: r.right - 0.75,
    t: r.top + 0.24 * r.height, b: r.bottom - 0.22 * r.height}))).sort((a, b) => a.t - b.t);
  for (let i = 0; i < flat.length; i++)
    for (let j = i + 1; j < flat.length && flat[j].t < flat[i].b; j++)
      if (flat[i].item !== flat[j].item && flat[i].l < flat[j].r && flat[j].l < flat[i].r)
        faults.push(`overlap: ${JSON.stringify(flat[i].item.text.slice(0, 40))} and ${JSON.stringify(flat[j].item.text.slice(0, 40))}`);
  for (const shown of root.querySelectorAll("svg.kvlab,.kvlab-view"))
    if (shown.parentElement.scrollWidth > shown.parentElement.clientWidth + 1 && shown.parentElement.clientWidth)
      faults.push("wider than its column");
  return [...new Set(faults)];
}
